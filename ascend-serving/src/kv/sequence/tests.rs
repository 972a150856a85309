//! Tests of sequences.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

use super::*;
use crate::kv::PadPolicy;
use proptest::prelude::*;

fn pool(blocks: usize) -> BlockPool {
    BlockPool::new(blocks, 4, PadPolicy::SkipNegative).unwrap()
}

#[test]
fn growing_is_all_or_nothing() {
    let pool = pool(2);
    let mut sequence = Sequence::new(&pool);
    assert_eq!(sequence.grow(5).unwrap().slots, [0, 1, 2, 3, 4]);
    let error = sequence.grow(4).unwrap_err();
    assert_eq!(error.rule, &rules::POOL_EXHAUSTED);
    let all = "asked for 25000 blocks; 0 free, 2 held, 0 waiting for steps in flight";
    assert_eq!(sequence.grow(100_000 - 5).unwrap_err().given, all.replace("25000", "24998"));
    assert_eq!((sequence.len(), sequence.row()), (5, &[0, 1][..]));
    assert_eq!(sequence.grow(3).unwrap().slots, [5, 6, 7]);
    assert_eq!(sequence.grow(usize::MAX).unwrap_err().rule, &rules::LENGTHS_OVERFLOW);
    assert_eq!(sequence.slot(8).unwrap_err().rule, &rules::SEQUENCE_LENGTH);
}

#[test]
fn a_shared_block_is_copied_by_whoever_writes_first() {
    let pool = pool(4);
    let mut first = Sequence::new(&pool);
    let _ = first.grow(6).unwrap();
    let mut second = first.share_prefix(5).unwrap();
    assert_eq!(pool.held_blocks(), 2);
    let grown = second.grow(1).unwrap();
    assert_eq!(grown.slots, [9]);
    let copy = grown.copies.first().unwrap();
    assert_eq!((copy.from.id(), copy.to), (1, 2));
    // The copy still holds the shared block; without the copy only the first sequence does.
    drop(grown);
    assert!(first.grow(1).unwrap().copies.is_empty());
    assert_eq!((first.row(), second.row()), (&[0, 1][..], &[0, 2][..]));
    drop((first, second));
    assert_eq!(pool.held_blocks(), 0);
}

#[test]
fn a_copy_is_awaited_as_long_as_somebody_holds_the_block() {
    let pool = pool(6);
    let cache = CacheEntry::new(&pool);
    let mut first = Sequence::new(&pool);
    let _ = first.grow(6).unwrap();
    let mut second = first.fork();
    let grown = second.grow(1).unwrap();
    let copy = grown.copies.first().unwrap();
    assert_eq!((first.uncopied(), second.uncopied()), (None, Some(2)));
    // Forks wait too, and prefixes that reach into the block.
    let mut third = second.fork();
    assert_eq!(second.share_prefix(5).unwrap().uncopied(), Some(2));
    assert_eq!(second.share_prefix(4).unwrap().uncopied(), None);
    // A copy from the block comes after the copy to it.
    let behind = third.grow(1).unwrap();
    let behind = behind.copies.first().unwrap();
    let error = behind.check_order(&cache).unwrap_err();
    assert_eq!(error.rule, &rules::BLOCK_UNCOPIED);
    assert_eq!(copy.copied().unwrap_err().rule, &rules::BLOCK_UNCOPIED);
    assert!(copy.is_awaited());
    copy.copied_in(&cache);
    behind.check_order(&cache).unwrap();
    assert_eq!((second.uncopied(), third.uncopied()), (None, Some(3)));
    // Growing keeps the mark; cutting before the block removes it.
    assert!(third.grow(1).unwrap().copies.is_empty());
    assert_eq!(third.uncopied(), Some(3));
    third.truncate(5).unwrap();
    assert_eq!(third.uncopied(), Some(3));
    third.truncate(4).unwrap();
    assert_eq!(third.uncopied(), None);
    assert!(!behind.is_awaited());
    // The block's next holder does not wait for the copy.
    let again = third.grow(1).unwrap();
    assert!(again.copies.is_empty());
    assert_eq!(third.row(), [0, 3]);
    behind.copied_in(&cache);
    // Preempted or ended, a sequence leaves nothing behind.
    for end in [true, false] {
        let mut fork = first.fork();
        let grown = fork.grow(1).unwrap();
        assert!(grown.copies.first().unwrap().is_awaited());
        if end {
            drop(fork);
        } else {
            fork.truncate(0).unwrap();
        }
        assert!(!grown.copies.first().unwrap().is_awaited());
    }
}

#[test]
fn blocks_before_a_window_go_back() {
    let pool = pool(4);
    let mut sequence = Sequence::new(&pool);
    let _ = sequence.grow(11).unwrap();
    sequence.drop_before(9).unwrap();
    assert_eq!((sequence.row(), pool.held_blocks()), (&[0, 0, 2][..], 1));
    assert_eq!(sequence.slot(7).unwrap_err().rule, &rules::SEQUENCE_LENGTH);
    assert_eq!(sequence.slot(8).unwrap(), 8);
    assert_eq!(sequence.drop_before(12).unwrap_err().rule, &rules::BLOCK_WINDOW);
    assert_eq!(sequence.share_prefix(9).unwrap_err().rule, &rules::SEQUENCE_LENGTH);
    assert_eq!(sequence.truncate(5).unwrap_err().rule, &rules::SEQUENCE_LENGTH);
    sequence.truncate(0).unwrap();
    assert_eq!((sequence.len(), pool.held_blocks()), (0, 0));
}

#[test]
fn a_sequence_that_shows_all_leaves_to_its_caller_what_is_given_back() {
    let pool = pool(4);
    let mut sequence = Sequence::new(&pool).seen_by(Some(Causality::Causal));
    let _ = sequence.grow(11).unwrap();
    sequence.drop_before(9).unwrap();
    sequence.truncate(9).unwrap();
    assert_eq!((sequence.len(), sequence.given_back()), (9, 8));
}

#[derive(Clone, Debug)]
enum Act {
    Grow(usize, usize),
    Fork(usize, usize),
    Truncate(usize, usize),
    End(usize),
}

fn act() -> impl Strategy<Value = Act> {
    prop_oneof![
        4 => (any::<usize>(), 0usize..9).prop_map(|(n, t)| Act::Grow(n, t)),
        2 => (any::<usize>(), any::<usize>()).prop_map(|(n, t)| Act::Fork(n, t)),
        2 => (any::<usize>(), any::<usize>()).prop_map(|(n, t)| Act::Truncate(n, t)),
        1 => any::<usize>().prop_map(Act::End),
    ]
}

proptest! {
    /// A cache simulated by tokens with names: every sequence reads back exactly its own tokens, however blocks
    /// are shared.
    #[test]
    fn every_sequence_reads_its_own_tokens(acts in prop::collection::vec(act(), 1..80)) {
        let pool = pool(12);
        let entry = CacheEntry::new(&pool);
        let mut cache = [0usize; 48];
        let mut sequences: Vec<(Sequence, Vec<usize>)> = vec![(Sequence::new(&pool), Vec::new())];
        let mut next = 1;
        for act in acts {
            match act {
                Act::Grow(n, tokens) => {
                    let place = n % sequences.len();
                    let (sequence, names) = &mut sequences[place];
                    if let Ok(grown) = sequence.grow(tokens) {
                        for copy in &grown.copies {
                            let from = copy.from.id() * 4;
                            cache.copy_within(from..from + 4, copy.to * 4);
                            prop_assert!(copy.check_order(&entry).is_ok() && copy.is_awaited());
                            copy.copied_in(&entry);
                        }
                        for slot in grown.slots {
                            cache[slot as usize] = next;
                            names.push(next);
                            next += 1;
                        }
                    }
                }
                Act::Fork(n, tokens) => {
                    let (sequence, names) = &sequences[n % sequences.len()];
                    let tokens = tokens % (sequence.len() + 1);
                    let prefix = (sequence.share_prefix(tokens).unwrap(), names[..tokens].to_vec());
                    sequences.push(prefix);
                }
                Act::Truncate(n, tokens) => {
                    let place = n % sequences.len();
                    let (sequence, names) = &mut sequences[place];
                    let tokens = tokens % (sequence.len() + 1);
                    sequence.truncate(tokens).unwrap();
                    names.truncate(tokens);
                }
                Act::End(n) if sequences.len() > 1 => { sequences.swap_remove(n % sequences.len()); }
                Act::End(_) => {}
            }
            for (sequence, names) in &sequences {
                for (position, name) in names.iter().enumerate() {
                    prop_assert_eq!(cache[sequence.slot(position).unwrap()], *name);
                }
            }
        }
        drop(sequences);
        prop_assert_eq!(pool.held_blocks(), 0);
        prop_assert_eq!(pool.free_blocks(), 12);
    }
}
