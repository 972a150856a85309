//! Blocks that several sequences hold: forks and prefixes are read, and what others read is not written.

use ascend_attention::bf16;
use ascend_serving::{BatchRequest, Causality, PrefixCache, rules};

use crate::tokens::{DIM, dense, packed};

use super::{Engine, LAYERS, distance, names};

#[test]
fn forks_have_what_was_computed_of_them() {
    let mut engine = Engine::new(8);
    let mut sequence = engine.sequence();
    let mut tokens = names(1, 130);
    engine.add(&mut sequence, &tokens);
    let mut late = sequence.fork();
    let mut prefix = sequence.share_prefix(129).unwrap();
    tokens.push(200);
    engine.add(&mut late, &tokens);
    let mut other = names(1, 129);
    other.extend([300, 301]);
    engine.add(&mut prefix, &other);
    tokens.truncate(130);
    tokens.push(400);
    engine.add(&mut sequence, &tokens);
}

/// A forgotten `grow` would write over tokens that another sequence or the prefix reads.
#[test]
fn tokens_that_another_sequence_reads_are_not_written_again() {
    let mut engine = Engine::new(8);
    let pool = engine.attention.cache().pool().clone();
    let mut prefixes = PrefixCache::<u64>::new(&pool, Causality::Causal).unwrap();
    let mut tokens = names(1, 128);
    let mut sequence = engine.sequence();
    engine.add(&mut sequence, &tokens);
    prefixes.insert(b"", &tokens, &sequence).unwrap();
    tokens.push(300);
    let fork = sequence.fork();
    drop(sequence);
    let hit = prefixes.share(b"", &tokens);
    for mut sequence in [fork, hit] {
        let again = engine.of_request(BatchRequest::of(&sequence, 1));
        assert_eq!(again.unwrap_err().rule, &rules::TABLE_SHARED);
        engine.add(&mut sequence, &tokens);
        // Its last block is its own.
        engine.metadata(&sequence, 1);
    }
}

/// Both would write their next token into one block.
#[test]
fn a_fork_in_front_of_the_step_that_computes_its_tokens_is_refused() {
    for tokens in [50, 128] {
        let mut engine = Engine::new(8);
        let mut sequence = engine.sequence();
        let mut names = names(1, tokens);
        engine.add(&mut sequence, &names);
        engine.grow(&mut sequence, 1);
        let early = engine.metadata(&sequence, 1);
        let mut fork = sequence.fork();
        names.push(200);
        // Before and after the fork.
        assert_eq!(engine.refused(&early, &names).rule, &rules::TABLE_SHARED);
        let late = engine.of_request(BatchRequest::of(&sequence, 1));
        let late = late.unwrap_err();
        assert_eq!(late.rule, &rules::TABLE_SHARED);
        let says = format!("`truncate` its sequence to {tokens}");
        assert!(late.fix.contains(&says), "{late}");
        // As it says, once for either of them.
        fork.truncate(tokens).unwrap();
        engine.add(&mut fork, &names);
        let alone = engine.metadata(&sequence, 1);
        engine.step(&alone, &names);
        for mut sequence in [sequence, fork] {
            let mut names = names.clone();
            names.push(300);
            engine.add(&mut sequence, &names);
        }
    }
}

/// A fork that comes and goes leaves the block to its sequence.
#[test]
fn a_fork_that_is_dropped_again_hurts_nobody() {
    let mut engine = Engine::new(2);
    let mut sequence = engine.sequence();
    let mut tokens = names(1, 50);
    engine.add(&mut sequence, &tokens);
    engine.grow(&mut sequence, 1);
    tokens.push(60);
    let metadata = engine.metadata(&sequence, 1);
    drop(sequence.fork());
    engine.step(&metadata, &tokens);
}

/// Of blocks that another sequence holds none is written, whichever of them they are.
#[test]
fn a_block_behind_the_first_may_be_shared_too() {
    let mut engine = Engine::new(8);
    let mut sequence = engine.sequence();
    engine.add(&mut sequence, &names(1, 300));
    let made_before = engine.metadata_again(&sequence, 300);
    let mut fork = sequence.fork();
    fork.drop_before(128).unwrap();
    let again = engine.of_request(BatchRequest::of(&sequence, 300).recompute());
    assert_eq!(again.unwrap_err().rule, &rules::TABLE_SHARED);
    let refused = engine.refused(&made_before, &names(1, 300));
    assert_eq!(refused.rule, &rules::TABLE_SHARED);
}

/// Who computes tokens once more takes them back and grows by them, which copies the block that others read.
#[test]
fn shared_tokens_are_computed_once_more_in_a_copied_block() {
    let mut engine = Engine::new(8);
    let mut sequence = engine.sequence();
    let tokens = names(1, 130);
    engine.add(&mut sequence, &tokens);
    let mut fork = sequence.fork();
    let refused = engine.of_request(BatchRequest::of(&fork, 1).recompute());
    let refused = refused.unwrap_err();
    assert_eq!(refused.rule, &rules::TABLE_SHARED);
    assert!(refused.fix.contains("`truncate` its sequence to 129"), "{refused}");
    fork.truncate(129).unwrap();
    engine.add(&mut fork, &tokens);
    engine.metadata_again(&fork, 1);
    engine.metadata(&sequence, 1);
}

#[test]
fn prefixes_are_found_once_they_are_computed() {
    let mut engine = Engine::new(8);
    let pool = engine.attention.cache().pool().clone();
    let mut prefixes = PrefixCache::<u64>::new(&pool, Causality::Causal).unwrap();
    let mut tokens = names(1, 140);
    let mut sequence = engine.sequence();
    engine.grow(&mut sequence, 140);
    let early = prefixes.insert(b"", &tokens, &sequence).unwrap_err();
    assert_eq!(early.rule, &rules::SEQUENCE_GAP);
    let metadata = engine.metadata(&sequence, 140);
    engine.step(&metadata, &tokens);
    // Tokens behind the last full block need not be computed.
    engine.grow(&mut sequence, 1);
    tokens.push(600);
    assert_eq!(prefixes.insert(b"", &tokens, &sequence).unwrap(), 1);
    drop(sequence);
    let mut hit = prefixes.share(b"", &tokens);
    assert_eq!((hit.len(), engine.computed(&hit)), (128, 128));
    tokens.truncate(128);
    tokens.extend(names(700, 3));
    engine.add(&mut hit, &tokens);
}

/// The step in progress writes its tokens in each layer, whoever has its blocks by then.
#[test]
fn a_step_in_progress_does_not_write_to_a_fork() {
    for cut in [false, true] {
        let mut engine = Engine::new(8);
        let mut graphs = engine.graphs();
        let mut sequence = engine.sequence();
        engine.add(&mut sequence, &names(1, 2));
        engine.grow(&mut sequence, 1);
        let mut metadata = engine.metadata(&sequence, 1);
        let stream = engine.stream.device().stream().unwrap();
        let mut step = graphs.begin(&stream, &mut metadata).unwrap();
        let row = |layer, what| packed::<bf16>(&stream, &[90], layer, what, 1);
        let mut forward = |layer| {
            let [query, key, value] = [0, 1, 2].map(|what| row(layer, what));
            step.forward(layer, (&query, &key, &value)).unwrap();
        };
        forward(0);
        let early = sequence.share_prefix(2).unwrap();
        let mut fork = early.fork();
        drop(early);
        match cut {
            true => sequence.truncate(0).unwrap(),
            false => drop(sequence),
        }
        stream.synchronize().unwrap();
        engine.add(&mut fork, &names(1, 3));
        engine.stream.synchronize().unwrap();
        (1..LAYERS).for_each(forward);
        stream.synchronize().unwrap();
        engine.add(&mut fork, &names(1, 4));
    }
}

/// A step that computes tokens once more may fail, and then they are those of no step.
#[test]
fn tokens_of_a_step_in_progress_are_not_computed_for_forks() {
    let mut engine = Engine::new(8);
    let pool = engine.attention.cache().pool().clone();
    let mut prefixes = PrefixCache::<u64>::new(&pool, Causality::Causal).unwrap();
    let mut sequence = engine.sequence();
    let tokens = names(1, 130);
    engine.add(&mut sequence, &tokens);
    let metadata = engine.metadata_again(&sequence, 130);
    let stream = engine.stream.device().stream().unwrap();
    let mut step = engine.attention.begin(&stream, &metadata).unwrap();
    let others = names(500, 130);
    let [query, key, value] = [0, 1, 2].map(|what| packed::<bf16>(&stream, &others, 0, what, 1));
    step.forward(0, (&query, &key, &value)).unwrap();
    let fork = sequence.fork();
    let refused = prefixes.insert(b"", &tokens, &sequence).unwrap_err();
    assert_eq!(refused.rule, &rules::SEQUENCE_GAP);
    drop(step);
    stream.synchronize().unwrap();
    assert_eq!((engine.computed(&sequence), engine.computed(&fork)), (0, 0));
    // Blocks of both, and then of the sequence alone.
    let again = engine.of_request(BatchRequest::of(&sequence, 130));
    assert_eq!(again.unwrap_err().rule, &rules::TABLE_SHARED);
    drop(fork);
    let metadata = engine.metadata(&sequence, 130);
    engine.step(&metadata, &tokens);
    prefixes.insert(b"", &tokens, &sequence).unwrap();
}

/// What a step in progress writes to a block is not the sequence's once the sequence has a copy of that block.
#[test]
fn a_block_copied_during_a_step_does_not_have_its_tokens() {
    let mut engine = Engine::new(8);
    let mut graphs = engine.graphs();
    let mut sequence = engine.sequence();
    let mut tokens = names(1, 3);
    engine.add(&mut sequence, &tokens);
    engine.grow(&mut sequence, 1);
    tokens.push(4);
    let mut metadata = engine.metadata(&sequence, 1);
    let stream = engine.stream.device().stream().unwrap();
    let mut step = graphs.begin(&stream, &mut metadata).unwrap();
    let fork = sequence.fork();
    engine.grow(&mut sequence, 1);
    tokens.push(5);
    engine.stream.synchronize().unwrap();
    for layer in 0..LAYERS {
        let [query, key, value] = [0, 1, 2].map(|what| packed::<bf16>(&stream, &[4], layer, what, 1));
        step.forward(layer, (&query, &key, &value)).unwrap();
    }
    step.end().unwrap();
    stream.synchronize().unwrap();
    assert_eq!((engine.computed(&sequence), engine.computed(&fork)), (3, 3));
    let one = engine.metadata(&sequence, 1);
    assert_eq!(engine.refused(&one, &tokens).rule, &rules::SEQUENCE_GAP);
    // Its fix.
    let both = engine.metadata(&sequence, 2);
    engine.step(&both, &tokens);
}

/// Its first layer would have the new token, and its second one the old.
#[test]
fn a_block_copied_while_tokens_are_computed_once_more_has_them_in_no_layer() {
    let mut engine = Engine::new(8);
    let mut graphs = engine.graphs();
    let mut sequence = engine.sequence();
    engine.add(&mut sequence, &names(1, 3));
    let stream = engine.stream.device().stream().unwrap();
    let mut again = engine.metadata_again(&sequence, 1);
    let mut step = graphs.begin(&stream, &mut again).unwrap();
    for layer in 0..LAYERS {
        let rows = [0, 1, 2].map(|what| packed::<bf16>(&stream, &[40], layer, what, 1));
        step.forward(layer, (&rows[0], &rows[1], &rows[2])).unwrap();
        stream.synchronize().unwrap();
        if layer == 0 {
            let fork = sequence.fork();
            engine.grow(&mut sequence, 1);
            engine.stream.synchronize().unwrap();
            assert_eq!(engine.computed(&fork), 2);
        }
    }
    step.end().unwrap();
    assert_eq!(engine.computed(&sequence), 2);
    let one = engine.metadata(&sequence, 1);
    let refused = engine.refused(&one, &[1, 2, 40, 50]);
    assert_eq!(refused.rule, &rules::SEQUENCE_GAP);
    let both = engine.metadata(&sequence, 2);
    engine.step(&both, &[1, 2, 40, 50]);
}

/// The copy would overwrite them.
#[test]
fn tokens_in_a_block_that_waits_for_a_copy_are_not_said_to_be_computed() {
    let mut engine = Engine::new(8);
    let mut sequence = engine.sequence();
    engine.add(&mut sequence, &names(1, 3));
    let mut fork = sequence.fork();
    let growth = fork.grow(1).unwrap();
    let cache = engine.attention.cache_mut();
    let early = cache.mark_computed(&fork, 4).unwrap_err();
    assert_eq!(early.rule, &rules::BLOCK_UNCOPIED);
    cache.copy_blocks(&engine.stream, &growth.copies).unwrap();
    cache.mark_computed(&fork, 4).unwrap();
}

/// The later layers of a step in progress would read them.
#[test]
fn tokens_before_a_step_in_progress_are_neither_moved_nor_computed_again() {
    let mut engine = Engine::new(8);
    let mut graphs = engine.graphs();
    let mut sequence = engine.sequence();
    engine.add(&mut sequence, &names(1, 3));
    let again = engine.metadata_again(&sequence, 3);
    engine.grow(&mut sequence, 1);
    let mut metadata = engine.metadata(&sequence, 1);
    let stream = engine.stream.device().stream().unwrap();
    let step = graphs.begin(&stream, &mut metadata).unwrap();
    let cache = engine.attention.cache_mut();
    let moved = cache.move_tokens(&engine.stream, &sequence, [(2, 0)]);
    assert!(moved.unwrap_err().breaks(&rules::SEQUENCE_IN_PROGRESS));
    assert_eq!(engine.refused(&again, &names(1, 3)).rule, &rules::SEQUENCE_CHANGED);
    let again = engine.metadata_again(&sequence, 4);
    assert_eq!(engine.refused(&again, &names(1, 4)).rule, &rules::SEQUENCE_IN_PROGRESS);
    drop(step);
    let cache = engine.attention.cache_mut();
    cache.move_tokens(&engine.stream, &sequence, [(2, 2)]).unwrap();
    engine.step(&again, &names(1, 4));
}

/// What a step in progress reads is not written, though the sequence of the step is gone.
#[test]
fn a_step_in_progress_reads_what_its_sequence_had() {
    let mut engine = Engine::new(8);
    let mut graphs = engine.graphs();
    let mut sequence = engine.sequence();
    let mut tokens = names(1, 128);
    engine.add(&mut sequence, &tokens);
    let mut fork = sequence.fork();
    engine.grow(&mut fork, 1);
    tokens.push(200);
    let mut metadata = engine.metadata(&fork, 1);
    let stream = engine.stream.device().stream().unwrap();
    let mut step = graphs.begin(&stream, &mut metadata).unwrap();
    drop(fork);
    let cache = engine.attention.cache_mut();
    let moved = cache.move_tokens(&engine.stream, &sequence, [(100, 5)]);
    assert!(moved.unwrap_err().breaks(&rules::TABLE_SHARED));
    sequence.truncate(100).unwrap();
    let mut others = names(1, 100);
    others.push(300);
    engine.add(&mut sequence, &others);
    engine.stream.synchronize().unwrap();
    for layer in 0..LAYERS {
        let inputs = [0, 1, 2].map(|what| packed::<bf16>(&stream, &[200], layer, what, 1));
        let [query, key, value] = inputs.each_ref();
        let output = step.forward(layer, (query, key, value)).unwrap();
        let output = output.download(&stream).unwrap();
        let want = dense(&tokens, layer, engine.attention.shape(), |_| true);
        let away = distance(&output[..DIM], &want);
        // One wrong token of 129 changes little.
        assert!(away < 2e-3, "{away} away");
    }
}
