//! Steps of one sequence: gaps, metadata of an earlier step, layers that are left out, drafts that are cut off.

use ascend_emu::{Site, inject};
use ascend_serving::{BatchRequest, rules};

use crate::harness;
use crate::tokens::packed;

use super::{Engine, LAYERS, both_kinds, names};

/// A new user makes room for a prompt and decodes behind it, or grows twice. Its blocks hold another request's old
/// tokens.
#[test]
fn a_gap_is_refused_and_its_fix_computes_it() {
    both_kinds(|mut engine| {
        // Somebody else's tokens, in the blocks that are handed out again.
        let mut other = engine.sequence();
        engine.add(&mut other, &names(5000, 200));
        drop(other);
        engine.stream.synchronize().unwrap();

        let mut tokens = names(1, 100);
        let mut sequence = engine.sequence();
        engine.grow(&mut sequence, 100);
        let metadata = engine.metadata(&sequence, 1);
        let gap = engine.refused(&metadata, &tokens);
        assert_eq!(gap.rule, &rules::SEQUENCE_GAP);
        assert!(gap.given.contains("99 tokens of request 0"), "{gap}");
        assert!(gap.allowed.contains("`of(&sequence, 100)`"), "{gap}");
        // As it says.
        let metadata = engine.metadata(&sequence, 100);
        engine.step(&metadata, &tokens);

        engine.grow(&mut sequence, 1);
        engine.grow(&mut sequence, 1);
        tokens.extend([200, 201]);
        let metadata = engine.metadata(&sequence, 1);
        let gap = engine.refused(&metadata, &tokens);
        assert_eq!(gap.rule, &rules::SEQUENCE_GAP);
        assert!(gap.allowed.contains("`of(&sequence, 2)`"), "{gap}");
        let metadata = engine.metadata(&sequence, 2);
        engine.step(&metadata, &tokens);

        // The other fix that it names: what is not wanted is cut off.
        engine.grow(&mut sequence, 7);
        engine.grow(&mut sequence, 1);
        let metadata = engine.metadata(&sequence, 1);
        assert_eq!(engine.refused(&metadata, &tokens).rule, &rules::SEQUENCE_GAP);
        assert_eq!(engine.computed(&sequence), 102);
        sequence.truncate(102).unwrap();
        tokens.push(202);
        engine.add(&mut sequence, &tokens);
    });
}

/// A new user makes the metadata once and begins every step with it.
#[test]
fn metadata_of_an_earlier_step_is_refused_and_its_fix_works() {
    both_kinds(|mut engine| {
        let mut sequence = engine.sequence();
        let mut tokens = names(1, 10);
        engine.add(&mut sequence, &tokens);
        engine.grow(&mut sequence, 1);
        tokens.push(50);
        let mut metadata = engine.metadata(&sequence, 1);
        engine.step(&metadata, &tokens);
        // Once more, as where the next `grow` was forgotten, or on purpose.
        let again = engine.refused(&metadata, &tokens);
        assert_eq!(again.rule, &rules::SEQUENCE_COMPUTED);
        let again = engine.metadata_again(&sequence, 1);
        engine.step(&again, &tokens);

        engine.grow(&mut sequence, 1);
        tokens.push(51);
        let stale = engine.refused(&metadata, &tokens);
        assert_eq!(stale.rule, &rules::SEQUENCE_CHANGED);
        assert!(stale.fix.contains("renew"), "{stale}");
        metadata.renew(&[BatchRequest::of(&sequence, 1)]).unwrap();
        engine.step(&metadata, &tokens);

        // Whatever changed it: cut within a block, and grown to the same length again.
        let of_step = engine.metadata(&sequence, 1);
        sequence.truncate(11).unwrap();
        assert_eq!(engine.refused(&of_step, &tokens).rule, &rules::SEQUENCE_CHANGED);
        engine.grow(&mut sequence, 1);
        assert_eq!(engine.refused(&of_step, &tokens).rule, &rules::SEQUENCE_CHANGED);
        let again = engine.metadata(&sequence, 1);
        engine.step(&again, &tokens);
    });
}

#[test]
fn a_step_without_some_layers_does_not_count() {
    both_kinds(|mut engine| {
        let mut sequence = engine.sequence();
        let mut tokens = names(1, 10);
        engine.grow(&mut sequence, 10);
        let prompt = engine.metadata(&sequence, 10);
        let only = |engine: &mut Engine, layers: &[usize]| {
            let layers = layers.iter().copied();
            engine.layers(&prompt, &names(1, 10), layers).map(drop)
        };
        only(&mut engine, &[0, 2]).unwrap();
        assert_eq!(engine.computed(&sequence), 0);
        engine.grow(&mut sequence, 1);
        tokens.push(50);
        let decode = engine.metadata(&sequence, 1);
        let missing = engine.refused(&decode, &tokens);
        assert_eq!(missing.rule, &rules::STEP_LAYERS_MISSING);
        assert!(missing.given.contains("without layer 1"), "{missing}");
        assert!(missing.allowed.contains("`of(&sequence, 11)`"), "{missing}");
        let all = engine.metadata(&sequence, 11);
        engine.step(&all, &tokens);

        // A layer twice, layer 0 for every one, and one too many, as of a model with more layers than the cache.
        let again = engine.metadata_again(&sequence, 11);
        for layers in [&[0, 1, 1][..], &[0, 0, 0], &[0, 1, 2, 0]] {
            let layers = layers.iter().copied();
            let why = engine.layers(&again, &tokens, layers).unwrap_err();
            assert!(why.breaks(&rules::STEP_LAYER_REPEATED), "{why}");
            assert!(why.to_string().contains("a second time"), "{why}");
        }
        engine.step(&again, &tokens);
        assert_eq!(engine.computed(&sequence), 11);
    });
}

#[test]
fn a_step_can_be_asked_whether_all_layers_ran() {
    let mut engine = Engine::new(2);
    let mut sequence = engine.sequence();
    engine.grow(&mut sequence, 1);
    let metadata = engine.metadata(&sequence, 1);
    let [query, key, value] = [0, 1, 2].map(|what| packed(&engine.stream, &[1], 0, what, 1));
    for ran in 0..=LAYERS {
        let mut step = engine.attention.begin(&engine.stream, &metadata).unwrap();
        for layer in 0..ran {
            step.forward(layer, (&query, &key, &value)).unwrap();
        }
        let ended = step.end();
        match ran {
            LAYERS => ended.unwrap(),
            _ => {
                let why = ended.unwrap_err();
                assert!(why.breaks(&rules::STEP_LAYERS_MISSING), "{why}");
                let left = match ran {
                    2 => "without layer 2,".to_owned(),
                    ran => format!("without layers {ran} to 2,"),
                };
                assert!(why.to_string().contains(&left), "{why}");
            }
        }
    }
}

/// Rejected drafts are cut off, and what grows in their place is computed anew.
#[test]
fn drafts_are_verified_and_rejected() {
    let mut engine = Engine::new(2);
    let mut sequence = engine.sequence();
    let mut tokens = names(1, 126);
    engine.add(&mut sequence, &tokens);
    tokens.extend([200, 201, 202, 203]);
    engine.add(&mut sequence, &tokens);
    // One draft of three.
    sequence.truncate(128).unwrap();
    tokens.truncate(128);
    assert_eq!(engine.computed(&sequence), 128);
    engine.grow(&mut sequence, 2);
    tokens.extend([300, 301]);
    let behind = engine.metadata(&sequence, 1);
    assert_eq!(engine.refused(&behind, &tokens).rule, &rules::SEQUENCE_GAP);
    let metadata = engine.metadata(&sequence, 2);
    engine.step(&metadata, &tokens);
}

/// Tokens that are cut off and grown again while their step is in progress are not what it computes.
#[test]
fn a_step_computes_nothing_that_came_behind_its_beginning() {
    let mut engine = Engine::new(2);
    let mut sequence = engine.sequence();
    engine.add(&mut sequence, &names(1, 4));
    engine.grow(&mut sequence, 4);
    let metadata = engine.metadata(&sequence, 4);
    let inputs: Vec<_> =
        (0..LAYERS).map(|layer| [0, 1, 2].map(|what| packed(&engine.stream, &names(10, 4), layer, what, 1))).collect();
    let mut step = engine.attention.begin(&engine.stream, &metadata).unwrap();
    sequence.truncate(6).unwrap();
    let _ = sequence.grow(2).unwrap();
    for (layer, [query, key, value]) in inputs.iter().enumerate() {
        step.forward(layer, (query, key, value)).unwrap();
    }
    step.end().unwrap();
    assert_eq!(engine.computed(&sequence), 6);
    let mut tokens = names(1, 4);
    tokens.extend([10, 11, 500, 501]);
    let metadata = engine.metadata(&sequence, 2);
    engine.step(&metadata, &tokens);
}

/// A step that begins too early by some tokens is refused with the number that is meant.
#[test]
fn a_step_that_begins_among_computed_tokens_is_refused() {
    let mut engine = Engine::new(2);
    let mut sequence = engine.sequence();
    let mut tokens = names(1, 8);
    engine.add(&mut sequence, &tokens);
    engine.grow(&mut sequence, 1);
    tokens.push(20);
    let metadata = engine.metadata(&sequence, 3);
    let early = engine.refused(&metadata, &tokens);
    assert_eq!(early.rule, &rules::SEQUENCE_COMPUTED);
    assert!(early.given.contains("tokens 6 to 7"), "{early}");
    assert!(early.allowed.contains("`of(&sequence, 1)`"), "{early}");
    let metadata = engine.metadata(&sequence, 1);
    engine.step(&metadata, &tokens);
}

#[test]
fn a_request_has_the_row_of_its_sequence() {
    let mut engine = Engine::new(8);
    let [mut one, mut other] = [engine.sequence(), engine.sequence()];
    engine.grow(&mut one, 3);
    engine.grow(&mut other, 3);
    let mut request = BatchRequest::of(&one, 3);
    request.row = other.row();
    let error = engine.of_request(request).unwrap_err();
    assert_eq!(error.rule, &rules::TABLE_ROW);
    let copied = one.row().to_vec();
    request.row = &copied;
    engine.of_request(request).unwrap();
}

/// Tokens count when they are queued. What a failed kernel did not write is found by the wait, and computed again
/// behind a cut.
#[test]
fn tokens_of_a_failed_kernel_are_computed_again_behind_a_cut() {
    if harness::not_on_npu("failures are injected into the emulation of this process") {
        return;
    }
    let mut engine = Engine::new(2);
    let mut sequence = engine.sequence();
    let mut tokens = names(1, 10);
    engine.add(&mut sequence, &tokens);
    engine.stream.synchronize().unwrap();
    for name in [50, 51] {
        engine.grow(&mut sequence, 1);
        tokens.push(name);
        let metadata = engine.metadata(&sequence, 1);
        let mut step = engine.attention.begin(&engine.stream, &metadata).unwrap();
        for layer in 0..LAYERS {
            let [query, key, value] = [0, 1, 2].map(|what| packed(&engine.stream, &[name], layer, what, 1));
            // The first launch of a layer writes its keys and values.
            let fault = (name == 50 && layer == 1).then(|| inject(Site::Launch, 1, 507_015));
            step.forward(layer, (&query, &key, &value)).unwrap();
            drop(fault);
        }
        step.end().unwrap();
    }
    let failed = engine.stream.synchronize().unwrap_err();
    assert!(matches!(&failed, ascend_attention::Error::Acl { status, .. } if status.0 == 507_015), "{failed}");
    assert_eq!(engine.computed(&sequence), 12);
    engine.grow(&mut sequence, 1);
    tokens.push(52);
    let metadata = engine.metadata(&sequence, 1);
    let away = engine.distance(&metadata, &tokens).unwrap();
    assert!(away > 2e-2, "{away} away, though a token was not written");
    sequence.truncate(10).unwrap();
    assert_eq!(engine.computed(&sequence), 10);
    engine.add(&mut sequence, &tokens);
}
