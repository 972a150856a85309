//! What users of captured graphs on this hardware were hurt by, with a function table that fails, or watches, where the
//! hardware did. The numbers are those of reports to vllm-project/vllm-ascend.

#![cfg(feature = "emulation")]

use crate::harness;

use std::collections::HashSet;
use std::ffi::{c_char, c_void};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use ascend_attention::attention::{BlockTable, CallLengths, Inputs, PerRequest};
use ascend_attention::graph::{CaptureEstimate, Capturing};
use ascend_attention::sys::bindings::{
    aclError, aclOpExecutor, aclmdlRICaptureMode, aclnnStatus, aclrtEvent, aclrtStream, aclrtTaskGrp,
};
use ascend_attention::sys::{Api, Functions};
use ascend_attention::{
    Error, FusedInferAttention, Graph, Layout, Output, Result, Runtime, Stream, Tensor, f16, rules,
};

const LIMIT: Duration = Duration::from_secs(60);
const DIM: usize = 64;
const COLUMNS: usize = 4;
const BLOCK_SIZE: usize = 16;

/// The tests share what the functions below count.
static TURN: Mutex<()> = Mutex::new(());

fn turn() -> MutexGuard<'static, ()> {
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The emulation with some functions replaced.
fn runtime(change: impl FnOnce(&mut Functions)) -> Runtime {
    let mut functions = harness::functions();
    change(&mut functions);
    let api = Arc::new(Api::from_functions(functions, "emulation, watched"));
    // SAFETY: the functions do what CANN's do, or fail as they may.
    unsafe { Runtime::from_api(api) }.unwrap()
}

struct Buffers {
    query: Tensor<f16>,
    cache: Tensor<f16>,
    table: BlockTable,
    outputs: Vec<Output<f16>>,
}

impl Buffers {
    fn new(stream: &Stream, layers: usize) -> Self {
        let device = stream.device();
        let upload = |seed, shape: &[usize]| {
            let data = harness::halves(seed, shape.iter().product());
            stream.upload(&data, shape).unwrap()
        };
        let output = |_| Output { attention: Tensor::empty(device, [2, 1, DIM]).unwrap(), softmax_lse: None };
        Self {
            query: upload(1, &[2, 1, DIM]),
            cache: upload(2, &[2 * COLUMNS, BLOCK_SIZE, DIM]),
            table: BlockTable::from_rows(stream, &[[3, 1, 0, 2], [7, 4, 5, 6]], BLOCK_SIZE).unwrap(),
            outputs: (0..layers).map(output).collect(),
        }
    }

    fn inputs(&self) -> Inputs<'_, f16> {
        Inputs::new(&self.query, &self.cache, &self.cache).paged(&self.table)
    }
}

fn record(capture: &Capturing<'_>, buffers: &Buffers) -> Result<()> {
    let longest = PerRequest::new(vec![COLUMNS * BLOCK_SIZE; 2])?;
    let longest = CallLengths::Batched { q: None, kv: &longest };
    let call = FusedInferAttention::new(Layout::Bsh).scale(1.0).heads(1);
    let call = capture.attention(&call, longest, buffers.inputs())?;
    for output in &buffers.outputs {
        capture.launch_into(call, buffers.inputs(), &mut output.clone())?;
    }
    Ok(())
}

fn replay<B>(graph: &mut Graph<B>, stream: &Stream, keys: [usize; 2]) -> Result<()> {
    let keys = PerRequest::new(keys.to_vec())?;
    let lengths = CallLengths::Batched { q: None, kv: &keys };
    let update = graph.update().all(lengths)?;
    graph.launch(stream, update)
}

static UPDATES: AtomicUsize = AtomicUsize::new(0);
/// The update that fails, counted from 1.
static FAILING: AtomicUsize = AtomicUsize::new(0);

unsafe extern "C" fn update_begin(stream: aclrtStream, group: aclrtTaskGrp) -> aclError {
    if UPDATES.fetch_add(1, Ordering::Relaxed) + 1 == FAILING.load(Ordering::Relaxed) {
        return 507_899;
    }
    // SAFETY: handed on to the caller.
    unsafe { harness::functions().aclmdlRICaptureTaskUpdateBegin.unwrap()(stream, group) }
}

/// 4233 and others: a step whose update fails halfway leaves the replay waiting. Here it is released, the failure
/// reported, and the graph not used again.
#[test]
fn an_update_that_fails_leaves_nobody_waiting() {
    let _turn = turn();
    let runtime = runtime(|functions| {
        functions.aclmdlRICaptureTaskUpdateBegin = Some(update_begin);
    });
    let stream = runtime.device(0).unwrap().stream().unwrap();
    for failing in 1..=3 {
        let buffers = Buffers::new(&stream, 3);
        let (mut graph, ()) = Graph::capture(stream.device(), buffers, record).unwrap();
        FAILING.store(0, Ordering::Relaxed);
        replay(&mut graph, &stream, [4, 40]).unwrap();
        UPDATES.store(0, Ordering::Relaxed);
        FAILING.store(failing, Ordering::Relaxed);
        let error = replay(&mut graph, &stream, [5, 41]).unwrap_err();
        assert!(matches!(&error, Error::Acl { function: "aclmdlRICaptureTaskUpdateBegin", .. }), "{error}");
        assert_eq!(UPDATES.load(Ordering::Relaxed), failing);
        stream.synchronize_timeout(LIMIT).unwrap();
        match replay(&mut graph, &stream, [6, 42]) {
            Err(Error::Violation(refused)) => assert_eq!(refused.rule, &rules::GRAPH_FAILED),
            other => panic!("{other:?}"),
        }
    }
    FAILING.store(0, Ordering::Relaxed);
}

static RECORDS: AtomicUsize = AtomicUsize::new(0);

/// Fails every fourth time.
unsafe extern "C" fn record_event(event: aclrtEvent, stream: aclrtStream) -> aclError {
    if RECORDS.fetch_add(1, Ordering::Relaxed) % 4 == 3 {
        return 507_899;
    }
    // SAFETY: handed on to the caller.
    unsafe { harness::functions().aclrtRecordEvent.unwrap()(event, stream) }
}

/// A replay whose event cannot be recorded is released too: without the record it would wait for ever.
#[test]
fn a_record_that_fails_leaves_nobody_waiting() {
    let _turn = turn();
    let runtime = runtime(|functions| functions.aclrtRecordEvent = Some(record_event));
    let stream = runtime.device(0).unwrap().stream().unwrap();
    for first in 0..4 {
        let buffers = Buffers::new(&stream, 3);
        let (mut graph, ()) = Graph::capture(stream.device(), buffers, record).unwrap();
        RECORDS.store(first, Ordering::Relaxed);
        // Whether it is reported depends on whether the second attempt succeeded.
        let _ = replay(&mut graph, &stream, [4, 40]);
        stream.synchronize_timeout(LIMIT).unwrap();
    }
}

/// Workspaces by the stream that a launch named.
static WORKSPACES: Mutex<Vec<(usize, usize)>> = Mutex::new(Vec::new());

unsafe extern "C" fn launch(
    workspace: *mut c_void,
    bytes: u64,
    executor: *mut aclOpExecutor,
    stream: aclrtStream,
) -> aclnnStatus {
    let seen = (stream.addr(), workspace.addr());
    let mut workspaces = WORKSPACES.lock().unwrap_or_else(PoisonError::into_inner);
    workspaces.push(seen);
    drop(workspaces);
    // SAFETY: handed on to the caller.
    unsafe {
        let launch = harness::functions().aclnnFusedInferAttentionScoreV4.unwrap();
        launch(workspace, bytes, executor, stream)
    }
}

/// 5464: a workspace that streams share. Each graph has its own, at one address from capture to every update; streams
/// have theirs.
#[test]
fn graphs_on_two_streams_share_no_workspace() {
    let _turn = turn();
    let runtime = runtime(|functions| functions.aclnnFusedInferAttentionScoreV4 = Some(launch));
    let device = runtime.device(0).unwrap();
    let streams = [device.stream().unwrap(), device.stream().unwrap()];
    let mut sets = Vec::new();
    let take = || -> HashSet<usize> {
        let mut workspaces = WORKSPACES.lock().unwrap();
        let taken = std::mem::take(&mut *workspaces);
        taken.into_iter().map(|(_, workspace)| workspace).collect()
    };
    let mut graphs = streams.each_ref().map(|stream| {
        let buffers = Buffers::new(stream, 3);
        take();
        let (graph, ()) = Graph::capture(&device, buffers, record).unwrap();
        sets.push(take());
        graph
    });
    for round in 0..3 {
        for ((graph, stream), set) in graphs.iter_mut().zip(&streams).zip(&sets) {
            replay(graph, stream, [4 + round, 40]).unwrap();
            assert_eq!(&take(), set);
        }
    }
    let buffers = graphs[0].buffers();
    let plan = FusedInferAttention::new(Layout::Bsh)
        .scale(1.0)
        .heads(1)
        .actual_seq_lengths_kv([4, 40])
        .plan(buffers.inputs())
        .unwrap();
    for stream in &streams {
        stream.synchronize_timeout(LIMIT).unwrap();
        plan.launch(stream, buffers.inputs()).unwrap();
        stream.synchronize_timeout(LIMIT).unwrap();
        sets.push(take());
    }
    assert!(plan.workspace_bytes() > 0);
    let all: HashSet<usize> = sets.iter().flatten().copied().collect();
    assert_eq!(all.len(), sets.len(), "{sets:?}");
    assert!(!all.contains(&0));
}

unsafe extern "C" fn no_queue(_: aclrtStream, _: aclmdlRICaptureMode) -> aclError {
    207_005
}

unsafe extern "C" fn no_stream(_: *mut aclrtStream) -> aclError {
    207_008
}

unsafe extern "C" fn told() -> *const c_char {
    c"[driver] Alloc sq cq fail".as_ptr()
}

/// 8393: a capture that fails with a code of the driver's when the streams are used up.
#[test]
fn too_many_captured_streams() {
    let _turn = turn();
    let in_begin = runtime(|functions| {
        functions.aclmdlRICaptureBegin = Some(no_queue);
        functions.aclGetRecentErrMsg = Some(told);
    });
    let device = in_begin.device(0).unwrap();
    let error = Graph::capture(&device, (), |_, ()| Ok(())).unwrap_err();
    assert!(matches!(&error, Error::StreamsExhausted { function: "aclmdlRICaptureBegin", .. }), "{error:?}");
    let text = error.to_string();
    for part in ["207005", "Alloc sq cq fail", "capture fewer sizes"] {
        assert!(text.contains(part), "{text}");
    }
    // Nothing is left of it: the thread may capture again, and wait.
    device.stream().unwrap().synchronize().unwrap();
    let in_create = runtime(|functions| functions.aclrtCreateStream = Some(no_stream));
    let device = in_create.device(0).unwrap();
    let error = Graph::capture(&device, (), |_, ()| Ok(())).unwrap_err();
    assert!(matches!(error, Error::StreamsExhausted { .. }), "{error}");
    // Known before.
    let refused = CaptureEstimate::new(32, 61).fits(CaptureEstimate::STREAMS);
    let refused = refused.unwrap_err();
    assert_eq!(refused.rule, &rules::GRAPH_STREAMS);
    assert!(refused.allowed.contains("29 graphs"), "{refused}");
}
