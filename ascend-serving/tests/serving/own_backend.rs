//! What a backend of one's own may make of a step: calls that compute each row once, from keys of its own request.

use std::num::NonZeroUsize;
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};

use ascend_attention::attention::{Cumulative, PerRequest};
use ascend_attention::mask::CausalOrigin;
use ascend_attention::merge::PartsOfRows;
use ascend_attention::spec::{Cann, Layout, Soc};
use ascend_attention::{AnyTensor, Machine, Mask, Runtime, Stream, Tensor, bf16};
use ascend_serving::kv::Sequence;
use ascend_serving::{
    AttentionBackend, AttentionMetadata, Backend, Backends, BatchRequest, BatchSettings, Causality, Error, GraphLimits,
    LayerInputs, LayerMask, LayerTensors, NamedMask, Result, StepCall, StepContext, StepPlan, StepProgram, rules,
};

use crate::graph_backends::{HEADS, KV_HEADS, LAYERS, attention};
use crate::harness;
use crate::tokens::packed;

type Program = fn(&StepContext<'_>) -> StepProgram<bf16>;

/// A backend of the caller.
struct Own(Box<Describes>);

/// A function from a step to its program.
type Describes = dyn Fn(&StepContext<'_>) -> StepProgram<bf16> + Send + Sync;

/// A backend that computes steps by a program.
fn own(program: impl Fn(&StepContext<'_>) -> StepProgram<bf16> + Send + Sync + 'static) -> Own {
    Own(Box::new(program))
}

impl AttentionBackend<bf16> for Own {
    fn name(&self) -> &'static str {
        "own"
    }

    fn program(&self, step: &StepContext<'_>, _: &LayerTensors<'_, bf16>) -> Result<StepProgram<bf16>> {
        Ok((self.0)(step))
    }
}

/// Queues a layer of a step of two requests, behind 3 and 126 cached tokens, by a program of the caller.
fn forward(stream: &Stream, program: Program, new: [usize; 2], sinks: Option<&AnyTensor>) -> Result<()> {
    forward_under(stream, program, new, sinks, Causality::Causal)
}

/// As [`forward`], under another mask.
fn forward_under(
    stream: &Stream,
    program: impl Fn(&StepContext<'_>) -> StepProgram<bf16> + Send + Sync + 'static,
    new: [usize; 2],
    sinks: Option<&AnyTensor>,
    mask: impl Into<LayerMask>,
) -> Result<()> {
    let mut attention = attention(stream, Backends::none().with(own(program)));
    let sequences = [3, 126].map(|cached| {
        let mut sequence = Sequence::new(attention.cache().pool());
        attention.grow(stream, &mut sequence, cached).unwrap();
        attention.cache().mark_computed(&sequence, cached).unwrap();
        sequence
    });
    let mut both = sequences.into_iter().zip(new);
    let mut sequences = [(); 2].map(|()| both.next().unwrap());
    for (sequence, new) in &mut sequences {
        attention.grow(stream, sequence, *new).unwrap();
    }
    let batch = (sequences.each_ref()).map(|(sequence, new)| BatchRequest::of(sequence, *new));
    let settings = BatchSettings::of(attention.cache(), Causality::Causal);
    let metadata = AttentionMetadata::new(&batch, settings).unwrap();
    let mask = mask.into();
    let names: Vec<u64> = (0..new.iter().sum::<usize>() as u64).collect();
    let query = packed::<bf16>(stream, &names, 0, 0, HEADS);
    let [key, value] = [1, 2].map(|what| packed::<bf16>(stream, &names, 0, what, KV_HEADS));
    let mut inputs = LayerInputs::from((&query, &key, &value));
    inputs.learnable_sink = sinks;
    inputs.mask = Some(&mask);
    let mut step = attention.begin(stream, &metadata)?;
    let output = step.forward(0, inputs)?;
    output.download(stream)?;
    Ok(())
}

/// A packed call over the cached keys of the step, with other lengths.
fn packed_call(step: &StepContext<'_>, more: usize) -> StepCall {
    let lengths = step.metadata.kv_lengths().lengths().iter();
    let lengths = lengths.map(|keys| keys + more).collect();
    StepCall::packed(step.metadata.q_ends().clone(), PerRequest::new(lengths).unwrap())
}

#[test]
fn rows_see_keys_of_their_own_request() {
    let stream = harness::stream();
    let right: [Program; 4] = [
        |step| StepCall::of_step(step).unwrap().into(),
        |step| packed_call(step, 0).into(),
        |step| StepProgram::new([0..1, 1..2].map(|of| call_of(step, of))),
        |step| packed_call(step, 0).blocks(blocks(step)).into(),
    ];
    for program in right {
        forward(&stream, program, [1, 1], None).unwrap();
    }
    let wrong: [Program; 8] = [
        // Lengths of the step before.
        |step| {
            let lengths = step.metadata.kv_lengths().lengths().iter();
            let lengths = lengths.map(|keys| keys - 1).collect();
            let ends = step.metadata.q_ends().clone();
            StepCall::packed(ends, PerRequest::new(lengths).unwrap()).into()
        },
        // The blocks of the other request.
        |step| {
            let mut exchanged = blocks(step);
            exchanged.reverse();
            packed_call(step, 0).blocks(exchanged).into()
        },
        |step| StepCall::over_own_keys(step.metadata.q_ends().clone()).into(),
        |step| packed_call(step, 1).into(),
        |_| {
            let all = Cumulative::new(vec![2]).unwrap();
            let keys = PerRequest::new(vec![4]).unwrap();
            StepCall::packed(all, keys).requests(0..1).into()
        },
        |step| StepProgram::new([0..1, 1..2].map(|of| call_of(step, of.clone()).rows(1 - of.start..2 - of.start))),
        |step| call_of(step, 0..2).requests(1..3).into(),
        |step| {
            let other = blocks(step).iter().map(|row| vec![row[0] + 9; row.len()]).collect();
            packed_call(step, 0).blocks(other).into()
        },
    ];
    for (at, program) in wrong.into_iter().enumerate() {
        let error = forward(&stream, program, [1, 1], None).unwrap_err();
        assert!(error.breaks(&rules::BACKEND_KEYS), "{at}: {error}");
    }
    // A full block and one that is filled in part, exchanged.
    let reversed = |step: &StepContext<'_>| {
        let mut blocks = blocks(step);
        blocks.iter_mut().for_each(|row| row.reverse());
        let mask = Causality::Causal.mask(&step.stream.device().masks());
        let call = packed_call(step, 0).blocks(blocks).mask(mask.unwrap());
        call.into()
    };
    let error = forward(&stream, reversed, [1, 10], None).unwrap_err();
    assert!(error.breaks(&rules::BACKEND_KEYS), "{error}");
    // Its first row sees 127 keys, its middle one 384 and its last one 641: what these see are the right keys.
    let exchanged = |step: &StepContext<'_>| {
        let mut blocks = blocks(step);
        blocks[1].swap(1, 2);
        let mask = Causality::Causal.mask(&step.stream.device().masks());
        packed_call(step, 0).blocks(blocks).mask(mask.unwrap()).into()
    };
    let error = forward(&stream, exchanged, [1, 515], None).unwrap_err();
    assert!(error.breaks(&rules::BACKEND_KEYS) || error.breaks(&rules::BACKEND_UNMASKED), "{error}");
    let in_order = |step: &StepContext<'_>| {
        let mask = Causality::Causal.mask(&step.stream.device().masks());
        let call = packed_call(step, 0).blocks(blocks(step));
        call.mask(mask.unwrap()).into()
    };
    forward(&stream, in_order, [1, 515], None).unwrap();
}

#[test]
fn a_wrong_program_fails_the_step_though_another_backend_would_serve_it() {
    let stream = harness::stream();
    let unmasked = own(|step| packed_call(step, 0).into());
    let backends = Backends::none().with(unmasked).with(Backend::Fused);
    let mut attention = attention(&stream, backends);
    let mut sequence = Sequence::new(attention.cache().pool());
    attention.grow(&stream, &mut sequence, 2).unwrap();
    let settings = BatchSettings::of(attention.cache(), Causality::Causal);
    let metadata = AttentionMetadata::new(&[BatchRequest::of(&sequence, 2)], settings).unwrap();
    let query = packed::<bf16>(&stream, &[0, 1], 0, 0, HEADS);
    let key = packed::<bf16>(&stream, &[0, 1], 0, 1, KV_HEADS);
    let mut step = attention.begin(&stream, &metadata).unwrap();
    let error = step.forward(0, (&query, &key, &key)).unwrap_err();
    assert!(error.breaks(&rules::BACKEND_UNMASKED), "{error}");
}

#[test]
fn parts_of_a_merge_show_each_key_once() {
    let stream = harness::stream();
    let program = |cached: fn(usize) -> usize, parts: u16| {
        move |step: &StepContext<'_>| {
            let counts = step.metadata.new_and_cached();
            let before = counts.map(|(_, keys)| cached(keys)).collect();
            let calls =
                [own_keys(step), StepCall::packed(step.metadata.q_ends().clone(), PerRequest::new(before).unwrap())];
            let rows = step.metadata.new_and_cached();
            let rows = rows.map(|(rows, _)| PartsOfRows { rows, parts });
            StepProgram::new(calls).merged(rows.collect())
        }
    };
    let outcome = |program| forward_under(&stream, program, [2, 2], None, Causality::Causal);
    outcome(program(|keys| keys, 0b11)).unwrap();
    for (keys, parts) in [
        ((|keys| keys + 1) as fn(usize) -> usize, 0b11),
        (|keys| keys - 1, 0b11),
        (|keys| keys, 0b01),
        (|keys| keys, 0b10),
    ] {
        let error = outcome(program(keys, parts)).unwrap_err();
        assert!(error.breaks(&rules::BACKEND_KEYS), "{error}");
    }
    // The row between two of its request does without the cached keys.
    let left_out = |step: &StepContext<'_>| {
        let counts = step.metadata.new_and_cached();
        let before = counts.map(|(_, keys)| keys).collect();
        let ends = step.metadata.q_ends().clone();
        let cached = StepCall::packed(ends, PerRequest::new(before).unwrap());
        let parts = [(1, 0b11), (1, 0b01), (1, 0b11), (2, 0b11)];
        let parts = parts.map(|(rows, parts)| PartsOfRows { rows, parts });
        StepProgram::new([own_keys(step), cached]).merged(parts.to_vec())
    };
    let error = forward(&stream, left_out, [3, 2], None).unwrap_err();
    assert!(error.breaks(&rules::BACKEND_KEYS), "{error}");
    let sparse = program(|keys| keys - 1, 0b11);
    let sparse = move |step: &StepContext<'_>| sparse(step).leaves_keys_out();
    forward_under(&stream, sparse, [2, 2], None, Causality::Causal).unwrap();
    // Without the cached keys, and without any.
    let own: Program = |step| StepProgram::from(own_keys(step)).leaves_keys_out();
    forward(&stream, own, [2, 2], None).unwrap();
    let none = program(|_| 0, 0b10);
    let none = move |step: &StepContext<'_>| none(step).leaves_keys_out();
    let error = forward_under(&stream, none, [2, 2], None, Causality::Causal).unwrap_err();
    assert!(error.breaks(&rules::BACKEND_KEYS), "{error}");
}

/// A causal call over the step's own keys.
fn own_keys(step: &StepContext<'_>) -> StepCall {
    let mask = Causality::Causal.mask(&step.stream.device().masks());
    StepCall::over_own_keys(step.metadata.q_ends().clone()).mask(mask.unwrap())
}

#[test]
fn a_mask_shows_what_the_step_shows() {
    let stream = harness::stream();
    let masks = stream.device().masks();
    let window = |keys| Causality::Window(NonZeroUsize::new(keys).unwrap());
    let operator = |causality: Causality| causality.mask(&masks).unwrap();
    let cases = [
        (Causality::Causal, operator(Causality::Causal), None),
        (window(50), operator(window(50)), None),
        (Causality::Bidirectional, Mask::none(), None),
        // A window that hides no key of the step.
        (window(200), operator(Causality::Causal), None),
        (window(50), operator(Causality::Causal), Some(&rules::BACKEND_UNMASKED)),
        (window(50), operator(window(51)), Some(&rules::BACKEND_UNMASKED)),
        (window(50), operator(window(49)), Some(&rules::BACKEND_KEYS)),
        (window(50), Mask::none(), Some(&rules::BACKEND_UNMASKED)),
        (Causality::Causal, Mask::none(), Some(&rules::BACKEND_UNMASKED)),
        (Causality::Causal, operator(window(50)), Some(&rules::BACKEND_KEYS)),
        (Causality::Causal, masks.causal(CausalOrigin::LeftUp).unwrap(), Some(&rules::BACKEND_KEYS)),
        (Causality::Bidirectional, operator(Causality::Causal), Some(&rules::BACKEND_KEYS)),
    ];
    let chunk = Causality::Chunk(NonZeroUsize::new(127).unwrap());
    // Of a chunk's rows the last alone sees as many keys as in a window of the chunk's size.
    let of_chunks = [(chunk, operator(window(127)), Some(&rules::BACKEND_UNMASKED))];
    let cases = (cases.map(|case| (case, [2, 3])).into_iter()).chain(of_chunks.map(|case| (case, [1, 128])));
    for ((of_step, of_call, rule), new) in cases {
        let text = format!("{of_call:?} in a step of {of_step:?}");
        let program = move |step: &StepContext<'_>| packed_call(step, 0).mask(of_call.clone()).into();
        let outcome = forward_under(&stream, program, new, None, of_step);
        match (rule, outcome) {
            (None, Ok(())) => {}
            (Some(rule), Err(error)) => assert!(error.breaks(rule), "{text}: {error}"),
            (_, outcome) => panic!("{text}: {outcome:?}"),
        }
    }
    let named = NamedMask::new("all", |_, _, _| true);
    let program = |step: &StepContext<'_>| packed_call(step, 0).into();
    let error = forward_under(&stream, program, [1, 1], None, named.clone()).unwrap_err();
    assert!(error.breaks(&rules::BACKEND_UNMASKED), "{error}");
}

#[test]
fn a_forgotten_mask_is_refused() {
    let stream = harness::stream();
    let forgotten: [Program; 2] = [
        |step| packed_call(step, 0).into(),
        |step| {
            let lengths = step.metadata.kv_lengths().clone();
            StepCall::batched(Layout::Bsnd, lengths).into()
        },
    ];
    for program in forgotten {
        let error = forward(&stream, program, [2, 2], None).unwrap_err();
        assert!(error.breaks(&rules::BACKEND_UNMASKED), "{error}");
    }
    let set = |step: &StepContext<'_>| {
        let mask = Causality::Causal.mask(&step.stream.device().masks());
        packed_call(step, 0).mask(mask.unwrap()).into()
    };
    forward(&stream, set, [2, 2], None).unwrap();
}

/// The blocks of the step's requests.
fn blocks(step: &StepContext<'_>) -> Vec<Vec<usize>> {
    let rows = 0..step.metadata.table().requests();
    rows.map(|row| step.metadata.table().row(row).unwrap().to_vec()).collect()
}

#[test]
fn own_keys_of_two_requests_are_two_sequences() {
    let stream = harness::stream();
    let first_step = |program: Program| {
        let mut attention = attention(&stream, Backends::none().with(own(program)));
        let sequences = [2, 3].map(|tokens| {
            let mut sequence = Sequence::new(attention.cache().pool());
            attention.grow(&stream, &mut sequence, tokens).unwrap();
            sequence
        });
        let batch = [BatchRequest::of(&sequences[0], 2), BatchRequest::of(&sequences[1], 3)];
        let settings = BatchSettings::of(attention.cache(), Causality::Causal);
        let metadata = AttentionMetadata::new(&batch, settings).unwrap();
        let query = packed::<bf16>(&stream, &[0, 1, 2, 3, 4], 0, 0, HEADS);
        let key = packed::<bf16>(&stream, &[0, 1, 2, 3, 4], 0, 1, KV_HEADS);
        let mut step = attention.begin(&stream, &metadata)?;
        step.forward(0, (&query, &key, &key)).map(drop)
    };
    fn sequences(step: &StepContext<'_>, ends: &[usize]) -> StepProgram<bf16> {
        let mask = Causality::Causal.mask(&step.stream.device().masks());
        StepCall::over_own_keys(Cumulative::new(ends.to_vec()).unwrap()).mask(mask.unwrap()).into()
    }
    first_step(|step| StepCall::of_step(step).unwrap().into()).unwrap();
    // Shorter sequences than the requests are chunks, which leave keys out.
    first_step(|step| sequences(step, &[1, 2, 4, 5]).leaves_keys_out()).unwrap();
    let error = first_step(|step| sequences(step, &[5]));
    let error = error.unwrap_err();
    assert!(error.breaks(&rules::BACKEND_KEYS), "{error}");
}

/// New and cached keys in two calls, of which the first may count the sinks, and the second counts them.
fn cascade(step: &StepContext<'_>, first_counts: bool) -> StepProgram<bf16> {
    let ends = step.metadata.q_ends();
    let new = own_keys(step);
    let new = if first_counts { new } else { new.without_sinks() };
    let before: Vec<_> = step.metadata.new_and_cached().map(|(_, cached)| cached).collect();
    let cached = StepCall::packed(ends.clone(), PerRequest::new(before).unwrap());
    let rows = step.metadata.new_and_cached();
    let rows = rows.map(|(new, _)| PartsOfRows { rows: new, parts: 3 });
    StepProgram::new([new, cached]).merged(rows.collect())
}

#[test]
fn a_merge_counts_sinks_once_and_where_log_sum_exps_do() {
    // The harness looks at what is left behind.
    drop(harness::runtime());
    for (soc, once) in [(Soc::Ascend950, true), (Soc::AtlasA2, false)] {
        let runtime = Runtime::emulated_as(&Machine::new(soc, Cann::V9_1)).unwrap();
        let stream = runtime.device(0).unwrap().stream().unwrap();
        let sinks = stream.upload(&[bf16::ONE; HEADS], [HEADS]).unwrap();
        for (program, counted) in
            [((|step| cascade(step, false)) as Program, once), (|step| cascade(step, true), false)]
        {
            forward(&stream, program, [2, 3], None).unwrap();
            let result = forward(&stream, program, [2, 3], Some(&sinks));
            match (counted, result) {
                (true, Ok(())) => {}
                (false, Err(error)) => assert!(error.breaks(&rules::BACKEND_SINKS), "{error}"),
                (_, result) => panic!("{soc:?}: {result:?}"),
            }
        }
    }
}

/// Plans a first step of one request by a backend, and gives the plan, its stream and layer to a test.
fn planned(
    backend: &dyn AttentionBackend<bf16>,
    mask: Option<NamedMask>,
    test: impl FnOnce(StepPlan<bf16>, &Stream, LayerTensors<'_, bf16>),
) {
    let stream = harness::stream();
    let mut attention = attention(&stream, Backends::none());
    let mut sequence = Sequence::new(attention.cache().pool());
    attention.grow(&stream, &mut sequence, 2).unwrap();
    let settings = BatchSettings::of(attention.cache(), Causality::Causal);
    let mut metadata = AttentionMetadata::new(&[BatchRequest::of(&sequence, 2)], settings).unwrap();
    if let Some(mask) = mask {
        metadata.set_mask(mask);
    }
    let cache = attention.cache();
    let block_table = cache.block_table(&stream, metadata.table()).unwrap();
    let step = StepContext {
        stream: &stream,
        shape: attention.shape(),
        metadata: &metadata,
        mask: metadata.mask(),
        block_table: &block_table,
        recorded: false,
        shares_keys: false,
    };
    let query = packed::<bf16>(&stream, &[0, 1], 0, 0, HEADS);
    let [key, value] = [1, 2].map(|what| packed::<bf16>(&stream, &[0, 1], 0, what, KV_HEADS));
    let layer = LayerTensors {
        layer: 0,
        query: &query,
        key: &key,
        value: &value,
        cache: cache.layer(0).unwrap(),
        quantised: None,
        learnable_sink: None,
        latent: None,
    };
    test(StepPlan::new(backend, &step, &layer).unwrap(), &stream, layer);
}

#[test]
fn outputs_have_the_rows_of_the_step_and_memory_of_their_own() {
    planned(&Backend::Fused, None, |plan, stream, layer| {
        let refused = |query: &Tensor<bf16>, output: &mut Tensor<bf16>| {
            let error = plan.launch_into(stream, &LayerTensors { query, ..layer }, output);
            match error.unwrap_err() {
                Error::Violation(violation) => violation.rule,
                other => panic!("{other}"),
            }
        };
        let long = packed::<bf16>(stream, &[0, 1, 2], 0, 0, HEADS);
        let mut output = plan.launch(stream, &layer).unwrap();
        assert_eq!(refused(layer.query, &mut long.clone()), &rules::PLAN_TENSORS);
        assert_eq!(refused(&long, &mut output), &rules::PLAN_TENSORS);
        assert_eq!(refused(layer.query, &mut layer.query.clone()), &rules::ARGUMENT_MEMORY);
        plan.launch_into(stream, &layer, &mut output).unwrap();
    });
}

#[test]
fn a_named_mask_counts_towards_the_memory_of_a_step() {
    // Two rows of a block of keys, a byte each.
    planned(&Backend::NamedMask, Some(NamedMask::new("all", |_, _, _| true)), |plan, _, _| {
        assert!(plan.memory().held >= 2 * 128, "{:?}", plan.memory());
    });
}

/// The call of some requests with one token each.
fn call_of(step: &StepContext<'_>, requests: Range<usize>) -> StepCall {
    let lengths = step.metadata.kv_lengths().lengths()[requests.clone()].to_vec();
    StepCall::batched(Layout::Bsnd, PerRequest::new(lengths).unwrap()).rows(requests.clone()).requests(requests)
}

#[test]
fn calls_that_leave_rows_out_or_repeat_them_are_refused() {
    let stream = harness::stream();
    let limits = GraphLimits::new([4], 300);
    let captured = |program: Program| {
        let backends = Backends::none().with(own(program));
        let captured = attention(&stream, backends).capture(&stream, Causality::Causal, &limits);
        captured.map(|graphs| graphs.backend(0))
    };
    let divided = |step: &StepContext<'_>| StepProgram::new([0..1, 1..4].map(|of| call_of(step, of)));
    assert_eq!(captured(divided).unwrap(), Some("own"));
    let wrong: [Program; 5] = [
        |_| StepProgram::new([]),
        |step| call_of(step, 0..3).into(),
        |step| StepProgram::new([0..2, 0..2].map(|of| call_of(step, of))),
        |step| StepProgram::new([0..3, 2..4].map(|of| call_of(step, of))),
        |step| StepProgram::new([0..3, 2..4].map(|of| call_of(step, of))).merged(vec![]),
    ];
    for program in wrong {
        let error = captured(program).unwrap_err();
        assert!(error.breaks(&rules::BACKEND_ROWS), "{error}");
    }
}

#[test]
fn padding_of_a_first_step_is_not_unwritten() {
    // One of four rows is a request's: the second call computes padding alone.
    let stream = harness::stream();
    // Harmless on an NPU, where nothing watches.
    let _strict = ascend_emu::check_scope(ascend_emu::Check::Strict);
    let calls = own(|step| StepProgram::new([call_of(step, 0..2), call_of(step, 2..4)]));
    let mut attention = attention(&stream, Backends::none().with(calls));
    let mut graphs = (attention.capture(&stream, Causality::Causal, &GraphLimits::new([4], 300))).unwrap();
    let mut sequence = Sequence::new(attention.cache().pool());
    attention.grow(&stream, &mut sequence, 1).unwrap();
    let settings = BatchSettings::of(attention.cache(), Causality::Causal);
    let mut metadata = AttentionMetadata::new(&[BatchRequest::of(&sequence, 1)], settings).unwrap();
    let mut step = graphs.begin(&stream, &mut metadata).unwrap();
    for layer in 0..LAYERS {
        let query = packed::<bf16>(&stream, &[7], layer, 0, HEADS);
        let [key, value] = [1, 2].map(|what| packed::<bf16>(&stream, &[7], layer, what, KV_HEADS));
        let output = step.forward(layer, (&query, &key, &value)).unwrap();
        output.download(&stream).unwrap();
    }
    step.end().unwrap();
}

#[test]
fn a_mask_tensor_of_each_step_is_not_replayed_by_that_of_the_capture() {
    let stream = harness::stream();
    let calls = own(|step| {
        let keys = step.block_table.columns() * step.block_table.block_size();
        let requests = step.metadata.kv_lengths().lengths().len();
        let hidden = Tensor::<i8>::empty(step.stream.device(), [requests, 1, keys]).unwrap();
        hidden.overwrite(step.stream, &vec![0; requests * keys]).unwrap();
        call_of(step, 0..requests).mask(Mask::all_mask(hidden)).into()
    });
    let attention = attention(&stream, Backends::none().with(calls));
    let captured = attention.capture(&stream, Causality::Causal, &GraphLimits::new([4], 300));
    let error = captured.unwrap_err();
    assert!(error.breaks(&rules::GRAPH_BACKEND), "{error}");
}

#[test]
fn what_a_graph_records_is_what_was_checked() {
    static ASKED: AtomicUsize = AtomicUsize::new(0);
    let stream = harness::stream();
    // The last time that a capture asks, the calls have blocks of their own.
    let calls = |step: &StepContext<'_>| {
        let call = call_of(step, 0..4);
        match ASKED.fetch_add(1, Ordering::Relaxed) {
            asked if asked < LAST.load(Ordering::Relaxed) => call.into(),
            _ => call.blocks(vec![vec![0]; 4]).into(),
        }
    };
    static LAST: AtomicUsize = AtomicUsize::new(usize::MAX);
    let limits = GraphLimits::new([4], 300);
    let capture = || {
        let attention = attention(&stream, Backends::none().with(own(calls)));
        attention.capture(&stream, Causality::Causal, &limits)
    };
    capture().unwrap();
    let asked = ASKED.swap(0, Ordering::Relaxed);
    assert!(asked > 1, "{asked}");
    for last in 1..asked {
        LAST.store(last, Ordering::Relaxed);
        ASKED.store(0, Ordering::Relaxed);
        let error = capture().unwrap_err();
        assert!(error.breaks(&rules::GRAPH_BACKEND), "{last} of {asked}: {error}");
    }
}
