//! Graphs of one group on several threads: no thread waits for ever, and a capture keeps nothing of another thread's.

use crate::harness;

use std::sync::mpsc::channel;
use std::thread;
use std::time::Duration;

use ascend_attention::attention::{BlockTable, CallLengths, Inputs, PerRequest};
use ascend_attention::graph::{Capturing, GraphGroup};
use ascend_attention::{FusedInferAttention, Graph, Layout, Output, Result, Stream, Tensor, f16};
use harness::halves;

/// Some wait is for ever if it takes longer than this.
const LIMIT: Duration = Duration::from_secs(60);
const DIM: usize = 64;

struct Buffers {
    query: Tensor<f16>,
    cache: Tensor<f16>,
    table: BlockTable,
    output: Output<f16>,
}

impl Buffers {
    fn new(stream: &Stream) -> Self {
        let upload = |seed, shape: &[usize]| {
            let data = halves(seed, shape.iter().product());
            stream.upload(&data, shape).unwrap()
        };
        Self {
            query: upload(1, &[2, 1, DIM]),
            cache: upload(2, &[8, 16, DIM]),
            table: BlockTable::with_columns(stream, &[vec![4, 1], vec![3]], 4, 16).unwrap(),
            output: Output { attention: Tensor::empty(stream.device(), [2, 1, DIM]).unwrap(), softmax_lse: None },
        }
    }

    fn inputs(&self) -> Inputs<'_, f16> {
        Inputs::new(&self.query, &self.cache, &self.cache).paged(&self.table)
    }
}

fn call() -> FusedInferAttention {
    FusedInferAttention::new(Layout::Bsh).scale(0.125).heads(1)
}

fn record(capture: &Capturing<'_>, buffers: &Buffers) -> Result<()> {
    let longest = PerRequest::new(vec![64, 64])?;
    let longest = CallLengths::Batched { q: None, kv: &longest };
    let call = capture.attention(&call(), longest, buffers.inputs())?;
    capture.launch_into(call, buffers.inputs(), &mut buffers.output.clone())
}

/// What a replay with these keys computes, which has to be over in time.
fn replayed(graph: &mut Graph<Buffers>, stream: &Stream, keys: [usize; 2]) -> Vec<f16> {
    let keys = PerRequest::new(keys.to_vec()).unwrap();
    let lengths = CallLengths::Batched { q: None, kv: &keys };
    let update = graph.update().all(lengths).unwrap();
    graph.launch(stream, update).unwrap();
    stream.synchronize_timeout(LIMIT).unwrap();
    graph.buffers().output.attention.download(stream).unwrap()
}

fn eager(buffers: &Buffers, stream: &Stream, keys: [usize; 2]) -> Vec<f16> {
    let plan = call().actual_seq_lengths_kv(keys);
    let plan = plan.plan(buffers.inputs()).unwrap();
    let output = plan.launch(stream, buffers.inputs()).unwrap();
    output.attention.download(stream).unwrap()
}

fn replay_within_the_capture_of_another_thread() {
    let stream = harness::stream();
    let mut group = GraphGroup::new(stream.device()).unwrap();
    let (mut first, ()) = group.capture(Buffers::new(&stream), record).unwrap();
    let want = eager(first.buffers(), &stream, [20, 7]);
    let (go, gone) = channel();
    let (done, is_done) = channel();
    let device = stream.device().clone();
    let replays = thread::spawn(move || {
        gone.recv().unwrap();
        let stream = device.stream().unwrap();
        done.send(replayed(&mut first, &stream, [20, 7])).unwrap();
    });
    let buffers = Buffers::new(&stream);
    let (mut second, got) = group
        .capture(buffers, |capture, buffers| {
            record(capture, buffers)?;
            go.send(()).unwrap();
            Ok::<_, ascend_attention::Error>(is_done.recv_timeout(LIMIT).ok())
        })
        .unwrap();
    assert_eq!(got.as_ref(), Some(&want), "replayed within the capture");
    replays.join().unwrap();
    for keys in [[20, 7], [32, 16]] {
        let want = eager(second.buffers(), &stream, keys);
        assert_eq!(replayed(&mut second, &stream, keys), want);
    }
}

/// The capture of a second graph goes on while another thread replays the first one and drops it: the replay is over
/// before the capture is, and the second graph waits for no event of the first.
#[test]
fn a_graph_is_replayed_while_another_thread_captures_the_next_of_its_group() {
    // Should a wait be for ever after all, only this thread is left to say so.
    let (over, is_over) = channel();
    let body = thread::spawn(move || {
        replay_within_the_capture_of_another_thread();
        over.send(()).unwrap();
    });
    if is_over.recv_timeout(3 * LIMIT).is_err() {
        assert!(body.is_finished(), "a wait for ever");
    }
    body.join().unwrap();
}
