//! Models with layers of linear attention beside full and windowed ones: any schedule of requests is the recurrence,
//! and attention, over their tokens in double precision.

mod engine;
mod graphs;
mod model;
mod variants;

use ascend_attention::delta_rule::DeltaTensors;
use ascend_attention::spec::Cann;
use ascend_attention::{Stream, bf16, f16};
use ascend_serving::kv::{CacheShape, Convolution, PadPolicy, PagedKvCache, Sequence, StatePool, StateShape};
use ascend_serving::{
    Attention, AttentionMetadata, Backend, Backends, BatchRequest, BatchSettings, Causality, ConvolutionInputs, Error,
    LayerGroup, NamedMask, PrefixCache, Result, StatePolicy, rules,
};

use model::*;

fn step_of(attention: &Attention<bf16>, requests: &[(&Sequence, usize)]) -> Result<AttentionMetadata> {
    let requests = requests.iter().map(|(sequence, new)| BatchRequest::of(sequence, *new));
    Ok(attention.metadata(&requests.collect::<Vec<_>>(), StatePolicy::default())?)
}

/// Computes the last tokens of a sequence.
fn compute(attention: &mut Attention<bf16>, stream: &Stream, sequence: &Sequence, new: usize) -> Result<()> {
    let metadata = step_of(attention, &[(sequence, new)])?;
    let names: Vec<u64> = (0..new as u64).collect();
    let mut step = attention.begin(stream, &metadata)?;
    for layer in 0..LAYERS {
        forward(&mut step, stream, &names, 0, layer)?;
    }
    step.end()
}

#[test]
fn a_sequence_that_is_kept_is_a_snapshot_in_one_slot() {
    let stream = stream();
    let mut attention = model(&stream, 2);
    let free = |attention: &Attention<bf16>| attention.states().unwrap().free_slots();
    let mut sequence = attention.sequence();
    attention.grow(&stream, &mut sequence, 32).unwrap();
    compute(&mut attention, &stream, &sequence, 32).unwrap();
    assert_eq!(free(&attention), SLOTS - 3);
    let prefix = sequence.share_prefix(32).unwrap();
    // The state behind fewer tokens of a prompt is not kept.
    let refused = sequence.share_prefix(16).unwrap_err();
    assert_eq!(refused.rule, &rules::STATE_KEPT);
    assert_eq!(refused.allowed, "0 or 32 tokens", "{refused}");
    attention.grow(&stream, &mut sequence, 1).unwrap();
    assert_eq!(free(&attention), SLOTS - 4);
    compute(&mut attention, &stream, &sequence, 1).unwrap();
    drop(sequence);
    assert_eq!(free(&attention), SLOTS - 1);
    // Requests begin with it, as often as there is room.
    let mut begun = Vec::new();
    loop {
        let mut sequence = prefix.fork();
        match attention.grow(&stream, &mut sequence, 1) {
            Ok(()) => begun.push(sequence),
            Err(refused) => break assert!(refused.breaks(&rules::STATE_EXHAUSTED), "{refused}"),
        }
    }
    assert_eq!((begun.len(), free(&attention)), ((SLOTS - 1) / 3, (SLOTS - 1) % 3));
}

#[test]
fn prefixes_are_found_where_a_state_was_kept() {
    let stream = stream();
    let mut attention = model(&stream, 0);
    let mut prefixes = PrefixCache::<u64>::of(&attention).unwrap();
    let prompt: Vec<u64> = (0..50).collect();
    let mut sequence = prefixes.share(b"", &prompt);
    for (new, found) in [(20, 0), (28, 48), (2, 48)] {
        attention.grow(&stream, &mut sequence, new).unwrap();
        compute(&mut attention, &stream, &sequence, new).unwrap();
        prefixes.insert(b"", &prompt[..sequence.len()], &sequence).unwrap();
        assert_eq!(prefixes.hit_len(b"", &[&prompt[..], &[50]].concat()), found);
    }
    // Sequences without a state are not inserted, nor those of another model.
    let plain = Sequence::new(attention.groups()[0].cache().pool());
    assert_eq!(prefixes.insert(b"", &[], &plain).unwrap_err().rule, &rules::PREFIX_GROUPS);
    let free = |attention: &Attention<bf16>| attention.states().unwrap().free_slots();
    let shared = prefixes.share(b"", &prompt);
    assert_eq!((shared.len(), free(&attention)), (48, SLOTS - 2));
    // What a sequence begins with is not given back; then it is, and its blocks stay.
    assert_eq!(prefixes.evict_states(1), 0);
    drop(shared);
    assert_eq!((prefixes.evict_states(5), prefixes.hit_len(b"", &prompt)), (1, 0));
    assert_eq!(prefixes.cached_blocks(0).unwrap(), 3);
    // They are found again once a step has the state anew.
    sequence.truncate(0).unwrap();
    attention.grow(&stream, &mut sequence, 32).unwrap();
    compute(&mut attention, &stream, &sequence, 32).unwrap();
    prefixes.insert(b"", &prompt[..32], &sequence).unwrap();
    assert_eq!(prefixes.hit_len(b"", &prompt), 32);
    // Without its blocks a state is not kept either.
    drop(sequence);
    prefixes.evict(0, 3).unwrap();
    assert_eq!(free(&attention), SLOTS);
}

#[test]
fn a_slot_that_two_prefixes_hold_is_given_back_once() {
    let stream = stream();
    let mut attention = model(&stream, 0);
    let mut prefixes = PrefixCache::<u64>::of(&attention).unwrap();
    let prompt: Vec<u64> = (0..50).collect();
    let mut sequence = attention.sequence();
    attention.grow(&stream, &mut sequence, 48).unwrap();
    compute(&mut attention, &stream, &sequence, 48).unwrap();
    for name in [b"one", b"two"] {
        prefixes.insert(name, &prompt[..48], &sequence).unwrap();
        assert_eq!(prefixes.hit_len(name, &prompt), 48);
    }
    let free = |attention: &Attention<bf16>| attention.states().unwrap().free_slots();
    assert_eq!((prefixes.evict_states(1), free(&attention)), (0, SLOTS - 1));
    drop(sequence);
    assert_eq!((prefixes.evict_states(5), free(&attention)), (1, SLOTS));
    assert_eq!([b"one", b"two"].map(|name| prefixes.hit_len(name, &prompt)), [0, 0]);
}

#[test]
fn forks_between_growth_and_step_get_a_copy() {
    let stream = stream();
    let mut attention = model(&stream, 0);
    let mut sequence = attention.sequence();
    attention.grow(&stream, &mut sequence, 16).unwrap();
    compute(&mut attention, &stream, &sequence, 16).unwrap();
    let first = attention.states().unwrap().layer(0).unwrap().tensor().download_bytes(&stream).unwrap();
    attention.grow(&stream, &mut sequence, 1).unwrap();
    let fork = sequence.share_prefix(16).unwrap();
    compute(&mut attention, &stream, &sequence, 1).unwrap();
    let after = attention.states().unwrap().layer(0).unwrap().tensor().download_bytes(&stream).unwrap();
    let slot = first.len() / SLOTS;
    assert!(first[..slot].iter().any(|byte| *byte != 0) && first[..slot] == after[..slot]);
    assert_ne!(after[slot..2 * slot], after[..slot]);
    drop((sequence, fork));
    assert_eq!(attention.states().unwrap().free_slots(), SLOTS);
}

#[test]
fn steps_refuse_what_does_not_go_together() {
    let stream = stream();
    let (mut attention, mut other) = (model(&stream, 1), model(&stream, 1));
    let mut sequence = attention.sequence();
    attention.grow(&stream, &mut sequence, 2).unwrap();
    let first = step_of(&attention, &[(&sequence, 2)]).unwrap();
    let is = |outcome: Result<()>, rule| match outcome {
        Err(refused) => assert!(refused.breaks(rule), "{refused}"),
        Ok(()) => panic!("not refused by {rule:?}"),
    };
    // Sequences of the caches alone have no state, and those of another model have one elsewhere.
    let plain = Attention::of_groups(1, [group(&stream, 0)]).unwrap();
    is(attention.grow(&stream, &mut plain.sequence(), 1), &rules::GROUP_LAYERS);
    is(other.grow(&stream, &mut sequence, 1), &rules::BLOCK_POOL);
    let elsewhere = stream.device().stream().unwrap();
    is(attention.grow(&elsewhere, &mut sequence, 1), &rules::STATE_STREAM);
    is(attention.begin(&elsewhere, &first).map(drop), &rules::STATE_STREAM);
    assert_eq!(sequence.len(), 2);

    let mut step = attention.begin(&stream, &first).unwrap();
    let (rows, longer) = (Rows::new(&stream, &[1, 2], 0, 0), Rows::new(&stream, &[1, 2, 3], 0, 0));
    let zeros = |count: usize| upload(&stream, std::iter::repeat_n(0.0, count * VALUES), &[count, 2, 4]);
    let (value, value_of_three) = (zeros(2), zeros(3));
    // A layer is convolved once, before it is computed, and others are not.
    is(step.forward(0, rows.tensors(&value)).map(drop), &rules::STEP_CONVOLUTION);
    is(longer.convolved(&mut step, &stream, 0).map(drop), &rules::STEP_TOKENS);
    is(rows.convolved(&mut step, &stream, FULL).map(drop), &rules::STEP_KIND);
    is(rows.convolved(&mut step, &stream, LAYERS).map(drop), &rules::ARGUMENT_VALUE);
    let value = rows.convolved(&mut step, &stream, 0).unwrap();
    is(rows.convolved(&mut step, &stream, 0).map(drop), &rules::STEP_CONVOLUTION);
    let wide = upload(&stream, std::iter::repeat_n(1.0, 2 * HEADS * DIM), &[2, HEADS, DIM]);
    let key = wide.narrow(1, 0..1).unwrap().contiguous(&stream).unwrap();
    is(step.forward(0, longer.tensors(&value_of_three)).map(drop), &rules::STEP_TOKENS);
    is(step.forward(LAYERS, rows.tensors(&value)).map(drop), &rules::ARGUMENT_VALUE);
    is(step.forward(FULL, rows.tensors(&value)).map(drop), &rules::STEP_KIND);
    is(step.forward(LINEAR[0], (&wide, &key, &key)).map(drop), &rules::STEP_KIND);
    let mut narrow = key.clone();
    is(step.forward_into(0, rows.tensors(&value), &mut narrow), &rules::PLAN_TENSORS);
    let mut output = zeros(2);
    step.forward_into(0, rows.tensors(&value), &mut output).unwrap();
    assert!(step.selected(0).is_none());
    is(step.forward(0, rows.tensors(&value)).map(drop), &rules::STEP_LAYER_REPEATED);
    is(rows.convolved(&mut step, &stream, 0).map(drop), &rules::STEP_LAYER_REPEATED);
    // A layer that is refused has written nothing, and is queued again.
    let value = rows.convolved(&mut step, &stream, LINEAR[0]).unwrap();
    let mut without_decay = rows.tensors(&value);
    without_decay.g = None;
    // Layers have their numbers in the model.
    let refused = step.forward(LINEAR[0], without_decay).map(drop).unwrap_err();
    assert!(refused.to_string().contains(&format!("in layer {}, of linear", LINEAR[0])), "{refused}");
    is(Err(refused), &rules::STEP_LAYERS);
    let heads = rows.tensors(&value);
    let heads = DeltaTensors::new((&wide, heads.key, heads.value), heads.beta).g(&rows.g);
    is(step.forward(LINEAR[0], heads).map(drop), &rules::STEP_HEADS);
    step.forward(LINEAR[0], rows.tensors(&value)).unwrap();
    for layer in [FULL, WINDOWED] {
        forward(&mut step, &stream, &[1, 2], 0, layer).unwrap();
    }
    step.end().unwrap();

    // The same metadata once more would count its tokens twice, and a step without growth too.
    is(attention.begin(&stream, &first).map(drop), &rules::SEQUENCE_COMPUTED);
    let again = [BatchRequest::of(&sequence, 2).recompute()];
    let again = attention.metadata(&again, StatePolicy::default()).unwrap();
    is(attention.begin(&stream, &again).map(drop), &rules::STATE_TOKENS);
    // A decode does not keep states behind drafts for which there are no slots.
    attention.grow(&stream, &mut sequence, 3).unwrap();
    let drafted = [BatchRequest::of(&sequence, 3).drafts(2)];
    let drafted = attention.metadata(&drafted, StatePolicy::default()).unwrap();
    is(attention.begin(&stream, &drafted).map(drop), &rules::STATE_DRAFTS);
    // What something else has computed is not in the state, and a state has its tokens in their order.
    is(attention.mark_computed(&sequence, 5).map_err(Error::from), &rules::STATE_TOKENS);
    is(attention.move_tokens(&stream, &sequence, [(1, 0)]), &rules::STATE_KEPT);
    assert_eq!(attention.computed_tokens(&sequence).unwrap(), 2);

    // Tokens that see later ones: a state has taken the tokens before, and no others.
    let mut later = step_of(&attention, &[(&sequence, 3)]).unwrap();
    later.set_mask(NamedMask::new("pairs", |_, token, key| key / 2 <= token / 2));
    is(attention.begin(&stream, &later).map(drop), &rules::STEP_CAUSALITY);
    // A step of some layers of attention alone is begun again.
    let next = step_of(&attention, &[(&sequence, 3)]).unwrap();
    let mut step = attention.begin(&stream, &next).unwrap();
    forward(&mut step, &stream, &[1, 2, 3], 0, FULL).unwrap();
    is(step.end(), &rules::STEP_LAYERS_MISSING);
    attention.begin(&stream, &next).unwrap();
    // Requests without sequences have no state, and metadata holds no slot.
    let row = sequence.row().to_vec();
    let settings = BatchSettings::of(attention.cache(), Causality::Causal);
    let without = AttentionMetadata::new(&[BatchRequest::in_row(&row, 0, 3)], settings).unwrap();
    is(attention.begin(&stream, &without).map(drop), &rules::GROUP_LAYERS);
    drop(sequence);
    assert!(attention.begin(&stream, &next).is_err());
    assert_eq!(attention.states().unwrap().free_slots(), SLOTS);
}

/// Convolutions that are refused write nothing: the right ones follow in the same step, whose outputs are right.
#[test]
fn convolutions_that_are_refused_leave_the_step_usable() {
    let stream = stream();
    for drafts in [0, 2] {
        let mut attention = model(&stream, drafts);
        let mut sequence = attention.sequence();
        for (names, done) in [([1, 2, 3], 0), ([4, 5, 6], 3)] {
            attention.grow(&stream, &mut sequence, 3).unwrap();
            let metadata = step_of(&attention, &[(&sequence, 3)]).unwrap();
            let windows = |at: usize| attention.states().unwrap().windows(at).unwrap().clone().typed::<bf16>().unwrap();
            let windows = [0, 1].map(windows);
            let mut step = attention.begin(&stream, &metadata).unwrap();
            for (at, layer) in LINEAR.into_iter().enumerate() {
                let rows = Rows::new(&stream, &names, 0, layer);
                let weight = upload(&stream, weights(layer).into_iter(), &[CONVOLUTION.width, CONVOLUTION.channels]);
                let mut is = |inputs: ConvolutionInputs<'_, bf16>, rule| {
                    let refused = step.convolve(layer, inputs).unwrap_err();
                    assert!(refused.breaks(rule), "{refused}");
                };
                // The first columns of rows twice as wide: a plan takes them, and copies of windows do not.
                let wide = rows.mixed.download(&stream).unwrap();
                let wide: Vec<_> = wide.chunks(CONVOLUTION.channels).flat_map(|row| [row, row].concat()).collect();
                let wide = stream.upload(&wide, [3, 2 * CONVOLUTION.channels]).unwrap();
                let columns = wide.narrow(1, 0..CONVOLUTION.channels).unwrap();
                if drafts > 0 && at == 0 {
                    is((&columns, &weight).into(), &rules::STEP_CONTIGUOUS);
                }
                // Rows of the pool that the layer writes.
                if let Some(windows) = windows.get(at) {
                    let own = windows.narrow(0, 0..1).unwrap();
                    let own = own.reshape([CONVOLUTION.width - 1, CONVOLUTION.channels]).unwrap();
                    is((&own, &weight).into(), &rules::ARGUMENT_MEMORY);
                }
                // A bias, other strides, narrower weights than the first layer brought.
                if at > 0 {
                    let bias = upload(&stream, std::iter::repeat_n(1.0, CONVOLUTION.channels), &[CONVOLUTION.channels]);
                    is(ConvolutionInputs::from((&rows.mixed, &weight)).bias(&bias), &rules::STEP_LAYERS);
                    is((&columns, &weight).into(), &rules::STEP_LAYERS);
                    is((&rows.mixed, &weight.narrow(0, 0..3).unwrap()).into(), &rules::STEP_LAYERS);
                }
                let values = rows.convolved(&mut step, &stream, layer).unwrap();
                let output = step.forward(layer, rows.tensors(&values)).unwrap().download(&stream).unwrap();
                let want = recurrence(&[1, 2, 3, 4, 5, 6], layer)[done..done + 3].concat();
                for (got, want) in output.iter().zip(want) {
                    assert!((got.to_f64() - want).abs() < 0.03, "{got} for {want} in layer {layer}");
                }
            }
            for layer in [FULL, WINDOWED] {
                forward(&mut step, &stream, &names, 0, layer).unwrap();
            }
            step.end().unwrap();
        }
    }
}

/// Prompts with decays of columns, and over states of single precision, which ChunkGatedDeltaRule does not take.
#[test]
fn prompts_without_an_operator_for_them_are_computed_in_pieces() {
    let (names, pad) = ((0..45).collect::<Vec<u64>>(), 2);
    for (cann, of_columns) in [(Cann::V9_1, true), (Cann::V9_2, false), (Cann::V9_2, true)] {
        let stream = stream_of(cann);
        let shape = StateShape { g: !of_columns, gk: of_columns, ..SHAPE };
        let states = match cann {
            Cann::V9_2 => StatePool::new::<f32>(&stream, SLOTS, shape),
            _ => StatePool::new::<bf16>(&stream, SLOTS, shape),
        };
        let mut attention = Attention::of_hybrid(3, [group(&stream, FULL)], [0, 2], states.unwrap()).unwrap();
        let mut sequences = [attention.sequence(), attention.sequence()];
        let lengths = [20, 25];
        for (sequence, length) in sequences.iter_mut().zip(lengths) {
            attention.grow(&stream, sequence, length).unwrap();
        }
        let mut metadata = step_of(&attention, &[(&sequences[0], 20), (&sequences[1], 25)]).unwrap();
        metadata.pad_to(names.len() + pad).unwrap();
        let mut step = attention.begin(&stream, &metadata).unwrap();
        for layer in [0, 2] {
            let rows = Rows::new(&stream, &names, pad, layer);
            // The decay of a head in each of its columns.
            let decays = rows.g.download(&stream).unwrap();
            let columns: Vec<f32> = decays.iter().flat_map(|g| [*g; SHAPE.key_dim]).collect();
            let columns = stream.upload(&columns, [names.len() + pad, SHAPE.value_heads, SHAPE.key_dim]).unwrap();
            let values = rows.convolved(&mut step, &stream, layer).unwrap();
            let mut tensors = rows.tensors(&values);
            if of_columns {
                (tensors.g, tensors.gk) = (None, Some(&columns));
            }
            let output = step.forward(layer, tensors).unwrap().download(&stream).unwrap();
            let want = lengths.iter().scan(0, |first, length| {
                let own = &names[*first..*first + length];
                *first += length;
                Some(recurrence(own, layer).concat())
            });
            let want = want.flatten().chain(std::iter::repeat_n(0.0, pad * 8)).collect::<Vec<f64>>();
            assert_eq!(output.len(), want.len());
            for (got, want) in output.iter().zip(want) {
                assert!((got.to_f64() - want).abs() < 0.03, "{got} for {want} in layer {layer} on {cann:?}");
            }
        }
    }
}

#[test]
fn sequences_have_a_state_of_the_model() {
    let stream = stream();
    let hybrid = |full| Attention::of_hybrid(3, [full], [0, 2], states(&stream, 0)).unwrap();
    let full = group(&stream, FULL);
    let shape = CacheShape::new(1, 1, DIM);
    let beside = PagedKvCache::new(stream.device(), BLOCKS, 16, shape, PadPolicy::SkipNegative).unwrap();
    let beside = beside.with_pool(full.cache().pool()).unwrap();
    let backends = Backends::none().with(Backend::Fused);
    let beside = LayerGroup::new([1], Causality::Causal, full.shape(), beside, backends);
    let (mut attention, mut other) = (hybrid(full), hybrid(beside));
    // Blocks of one pool, and states of two.
    let mut sequence = other.sequence();
    let refused = attention.grow(&stream, &mut sequence, 2).unwrap_err();
    assert!(refused.breaks(&rules::STATE_POOL), "{refused}");
    other.grow(&stream, &mut sequence, 2).unwrap();
    let mut plain = Sequence::new(attention.cache().pool());
    let refused = attention.grow(&stream, &mut plain, 2).unwrap_err();
    assert!(refused.breaks(&rules::STATE_REQUESTS), "{refused}");
    let _ = plain.grow(2).unwrap();
    for (sequence, rule) in [(&plain, &rules::STATE_REQUESTS), (&sequence, &rules::STATE_POOL)] {
        let metadata = step_of(&attention, &[(sequence, 2)]).unwrap();
        let refused = attention.begin(&stream, &metadata).unwrap_err();
        assert!(refused.breaks(rule), "{refused}");
    }
    // The cache alone does not move the tokens of a state either.
    let refused = other.cache_mut().move_tokens(&stream, &sequence, [(1, 0)]).unwrap_err();
    assert!(refused.breaks(&rules::STATE_KEPT), "{refused}");
}

#[test]
fn layers_of_both_kinds_are_named_once() {
    let stream = stream();
    let rule = |layers, linear: &[usize], pool| {
        let group = group(&stream, FULL);
        let linear = linear.iter().copied();
        Attention::of_hybrid(layers, [group], linear, pool).map(drop).map_err(|refused| refused.rule)
    };
    assert_eq!(rule(3, &[0, 2], states(&stream, 0)), Ok(()));
    for (layers, linear) in [(2, &[0, 2][..]), (3, &[0, 1]), (3, &[0, 0]), (4, &[0, 2]), (2, &[0]), (1, &[])] {
        assert_eq!(rule(layers, linear, states(&stream, 0)), Err(&rules::GROUP_LAYERS), "{linear:?} of {layers}");
    }
    let none = Attention::<bf16>::of_hybrid(2, [], [0, 1], states(&stream, 0));
    let none = none.unwrap_err();
    assert_eq!(none.rule, &rules::GROUP_LAYERS);
    assert!(none.given.contains("2 layers of linear attention, and no group"), "{none}");
    let endless = Attention::of_hybrid(2, [group(&stream, FULL)], std::iter::repeat(0), states(&stream, 0));
    assert_eq!(endless.unwrap_err().rule, &rules::GROUP_LAYERS);
}

#[test]
fn what_has_no_states_is_refused_by_name() {
    let stream = stream();
    let attention = model(&stream, 0);
    let choices = attention.backend_choices(&stream, LINEAR[0], Causality::Causal, None);
    assert!(choices.unwrap_err().breaks(&rules::STEP_KIND));
    assert!(attention.backend_choices(&stream, FULL, Causality::Causal, None).unwrap().len() > 1);
}

#[test]
fn pools_have_sizes_and_states_that_an_operator_takes() {
    let stream = stream();
    let sizes = |slots, shape| StatePool::new::<bf16>(&stream, slots, shape).unwrap_err();
    for refused in [
        sizes(0, SHAPE),
        sizes(1, StateShape { layers: 0, ..SHAPE }),
        sizes(1, StateShape { layers: usize::MAX, ..SHAPE }),
        sizes(1, StateShape { value_heads: 0, ..SHAPE }),
        sizes(1, StateShape { key_heads: 0, ..SHAPE }),
        sizes(1, StateShape { scale: f64::NAN, ..SHAPE }),
        sizes(1, StateShape { scale: 1e-60, ..SHAPE }),
        sizes(usize::MAX, SHAPE),
    ] {
        assert!(refused.breaks(&rules::ARGUMENT_VALUE), "{refused}");
    }
    assert!(sizes(9, StateShape { drafts: 8, ..SHAPE }).breaks(&rules::STATE_DRAFTS));
    let all = i32::MAX as usize;
    let large = StateShape {
        layers: 1,
        key_heads: all,
        value_heads: all,
        value_dim: all,
        key_dim: all,
        scale: 1.0,
        g: false,
        gk: false,
        drafts: 0,
        convolution: None,
    };
    assert!(StatePool::new::<bf16>(&stream, all, large).is_err());
    // Types and releases that the operator takes no states of.
    let rule = |refused: Error| match refused {
        Error::Violation(violation) => violation.rule.id,
        other => panic!("{other}"),
    };
    assert_eq!(rule(StatePool::new::<f16>(&stream, SLOTS, SHAPE).unwrap_err()), "recurrent_delta.dtype");
    assert_eq!(rule(StatePool::new::<f32>(&stream, SLOTS, SHAPE).unwrap_err()), "recurrent_delta.dtype");
    StatePool::new::<f32>(&stream_of(Cann::V9_2), SLOTS, SHAPE).unwrap();
    for (convolution, id) in [
        (Convolution { width: 5, ..CONVOLUTION }, "causal_conv.width"),
        (Convolution { width: 1, ..CONVOLUTION }, "causal_conv.width"),
        (Convolution { width: 0, ..CONVOLUTION }, "argument.value"),
        (Convolution { channels: 24, ..CONVOLUTION }, "causal_conv.channels"),
        (Convolution { channels: usize::MAX, ..CONVOLUTION }, "argument.value"),
    ] {
        let shape = StateShape { convolution: Some(convolution), ..SHAPE };
        assert_eq!(rule(StatePool::new::<bf16>(&stream, SLOTS, shape).unwrap_err()), id, "{convolution:?}");
    }
    let heads = StateShape { key_heads: 3, ..SHAPE };
    assert_eq!(rule(StatePool::new::<bf16>(&stream, SLOTS, heads).unwrap_err()), "recurrent_delta.heads");
    let wide = StateShape { key_dim: 513, ..SHAPE };
    assert_eq!(rule(StatePool::new::<bf16>(&stream, SLOTS, wide).unwrap_err()), "recurrent_delta.dims");
}
