//! Captured calls.

use std::num::NonZeroUsize;

use ascend_attention::attention::{BlockTable, CallLengths, Cumulative, Inputs, PerRequest};
use ascend_attention::{FusedInferAttention, Graph, Layout, Output, Tensor, bf16};
use ascend_serving::{AttentionShape, Causality};

use super::Table;
use super::recorder::{self, Said};
use crate::harness::filled;

const LAYERS: usize = 2;

struct Buffers {
    query: Tensor<bf16>,
    cache: Tensor<bf16>,
    table: BlockTable,
    outputs: [Output<bf16>; LAYERS],
}

impl Buffers {
    fn inputs(&self) -> Inputs<'_, bf16> {
        Inputs::new(&self.query, &self.cache, &self.cache).paged(&self.table)
    }
}

/// What is captured, and what a replay puts in its place, says what an eager call says: the mask comes from the same
/// function, and the longest lengths are the only thing that differs.
#[test]
fn captured_calls_say_what_eager_ones_say() {
    let table = Table::new();
    let stream = &table.stream;
    let window = Causality::Window(NonZeroUsize::new(7).unwrap());
    for causality in [Causality::Causal, window, Causality::Bidirectional] {
        let shape = AttentionShape::new(4, 2, 128);
        let call = FusedInferAttention::new(Layout::Tnd)
            .heads(4)
            .kv_heads(2)
            .scale(shape.scale)
            .mask(causality.mask(&stream.device().masks()).unwrap());
        let ones = |shape: [usize; 3]| filled(stream, bf16::ONE, shape);
        let output = || Output { attention: Tensor::empty(stream.device(), [2, 4, 128]).unwrap(), softmax_lse: None };
        let buffers = Buffers {
            query: ones([2, 4, 128]),
            cache: ones([6, 128, 256]),
            table: BlockTable::from_rows(stream, &[[2, 0], [1, 4]], 128).unwrap(),
            outputs: [output(), output()],
        };
        let ends = Cumulative::new(vec![1, 2]).unwrap();
        let lengths = |kv: [usize; 2]| PerRequest::new(kv.to_vec()).unwrap();
        let (now, longest) = (lengths([131, 10]), lengths([256, 256]));
        let of = |kv| CallLengths::PackedPaged { q: &ends, kv };

        let plan = of(&now).apply(call.clone()).plan(buffers.inputs());
        drop(plan.unwrap());
        let eager = recorder::take();
        assert_eq!(eager.len(), 1);
        let (mut graph, ()) = Graph::capture(stream.device(), buffers, |capture, buffers| {
            let captured = capture.attention(&call, of(&longest), buffers.inputs())?;
            let mut outputs = buffers.outputs.iter().cloned();
            outputs.try_for_each(|mut output| capture.launch_into(captured, buffers.inputs(), &mut output))
        })
        .unwrap();
        let want = Said { kv_lengths: Some(vec![256, 256]), ..eager[0].clone() };
        let captured = recorder::take();
        assert!(!captured.is_empty() && captured.iter().all(|said| *said == want));

        let update = graph.update().all(of(&now)).unwrap();
        graph.launch(stream, update).unwrap();
        let replayed = recorder::take();
        assert!(!replayed.is_empty() && replayed.iter().all(|said| *said == eager[0]));
        for output in &graph.buffers().outputs {
            let got = output.attention.download(stream).unwrap();
            assert!(got.iter().all(|x| *x == bf16::ONE), "{causality:?}");
        }
    }
}
