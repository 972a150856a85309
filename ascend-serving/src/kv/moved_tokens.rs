//! Moves of cached tokens within their sequence, for accepted drafts.

use std::collections::HashMap;
use std::ops::Range;

use ascend_attention::{Element, Stream, Tensor, Violation};

use crate::error::{Error, Result};
use crate::rules;

use super::block_copy::uncopied;
use super::cache::{CacheLayer, PagedKvCache};
use super::cache_shape::LayerCache;
use super::pool::{Block, StepProgress, spanning};
use super::quantised::{LayerScales, QuantisedLayer};
use super::sequence::Sequence;
use super::slot::{head_slot, spread_slot};
use super::slot_runs::{SlotRun, spread_blocks};

/// Joins pairs of slots, from and to, to as few runs as possible; a run stays in one block on each side, and its two
/// sides do not overlap.
fn runs_of(moves: &[(usize, usize)], block_size: usize) -> Vec<SlotRun> {
    let mut runs = Vec::new();
    let starts_block = |slot: usize| slot.is_multiple_of(block_size);
    for &(from, to) in moves {
        SlotRun::push(&mut runs, SlotRun { from, to, len: 1 }, |last| {
            // A copy between overlapping ranges does not give what copies of the single tokens give.
            !starts_block(from) && !starts_block(to) && last.from.abs_diff(last.to) > last.len
        });
    }
    runs
}

/// A cache as contiguous rows, `[blocks * pieces * block_size, elements]` of its [blocks in memory](spread_blocks), the
/// stride of the cache's blocks in these, and the number of pieces that a token has in a block.
fn rows_of<T: Element>(cache: &Tensor<T>, block_size: usize) -> Result<(Tensor<T>, [usize; 2])> {
    let (cache, step) = &spread_blocks(cache)?;
    let shape = match cache.shape() {
        [blocks, pieces @ .., size, elements] if *size == block_size => {
            // The sizes of a tensor of the cache, which has elements.
            let pieces: usize = pieces.iter().product();
            Some(([blocks * pieces * size, *elements], pieces))
        }
        _ => None,
    };
    let Some((shape, pieces)) = shape else {
        return Err(Error::invalid(
            "cache",
            cache.desc(),
            format_args!("blocks of {block_size} tokens, `[blocks, .., {block_size}, elements]`"),
        )
        .fix("pass a layer of the cache that the blocks are of"));
    };
    Ok((cache.reshape(shape)?, [*step, pieces]))
}

impl<T: Element> LayerCache<T> {
    fn move_runs(&self, stream: &Stream, runs: &[SlotRun], block_size: usize) -> Result<()> {
        for tensor in [&self.key, &self.value] {
            let (rows, [step, pieces]) = rows_of(tensor, block_size)?;
            for run in runs {
                for piece in 0..pieces {
                    let slot = |slot| {
                        let slot = spread_slot(slot, block_size, step);
                        head_slot(slot, block_size, pieces, piece)
                    };
                    let run = SlotRun { from: slot(run.from), to: slot(run.to), len: run.len };
                    let source = rows.narrow(0, run.sources())?;
                    rows.narrow(0, run.places())?.copy_from(stream, &source)?;
                }
            }
        }
        Ok(())
    }
}

impl QuantisedLayer {
    fn move_runs(&self, stream: &Stream, runs: &[SlotRun], block_size: usize) -> Result<()> {
        self.cache.move_runs(stream, runs, block_size)?;
        match &self.scales {
            LayerScales::Token(scales) => scales.rows.move_runs(stream, runs, block_size),
            LayerScales::IndexKey(scales) => scales.move_runs(stream, runs, block_size),
            LayerScales::Channel { .. } | LayerScales::Latent(_) | LayerScales::Row => Ok(()),
            // Refused before, since tokens share scales.
            LayerScales::Group(_) => Ok(()),
        }
    }
}

impl<T: Element> PagedKvCache<T> {
    /// Queues copies of cached tokens of a sequence to other positions of it, in every layer: pairs of positions, from
    /// and to, one after another. Returns at once. The old contents of the target positions are lost; the other
    /// positions, and the length, stay. A call names each source once and each target once; a target
    /// may be the source of an earlier pair: a repeated pair would say nothing new, and any other repeated position
    /// would double or lose a token. Until the sequence is cut ([`Sequence::truncate`], also to its own length), it
    /// gets no new tokens, which would see what was moved twice and what was rejected; and no later call moves a token
    /// from a position between the first and the last target of earlier ones, these included: the same pairs again
    /// would move what has come to their places meanwhile. Where a copy fails on the device, some layers are moved and
    /// others not: the tokens from the first target on do not count as computed any more.
    ///
    /// After a tree of drafts was verified, its accepted drafts are made contiguous by
    /// [`AcceptedDrafts::moves`](crate::AcceptedDrafts::moves), and then the sequence is cut behind them
    /// ([`Sequence::truncate`]). Where several caches share a pool, such as those of a model and of its drafter, move
    /// the tokens in each of them before the cut: nothing finds one that was forgotten.
    ///
    /// # Errors
    /// [`ARGUMENT_DEVICE`](crate::rules::ARGUMENT_DEVICE) for a stream of another device;
    /// [`BLOCK_POOL`](crate::rules::BLOCK_POOL) for a sequence of another pool,
    /// [`SEQUENCE_LENGTH`](crate::rules::SEQUENCE_LENGTH) for positions that it does not have, or has given back,
    /// [`SEQUENCE_GAP`](crate::rules::SEQUENCE_GAP) for a token to move that neither a step has computed nor
    /// [`mark_computed`](PagedKvCache::mark_computed) named,
    /// [`SEQUENCE_MOVED`](crate::rules::SEQUENCE_MOVED) for one from between the targets of earlier calls, and for
    /// pairs of one call that have the source or the target of an earlier pair, or take from its target,
    /// [`SEQUENCE_IN_PROGRESS`](crate::rules::SEQUENCE_IN_PROGRESS) while a step of the sequence is in progress,
    /// [`TABLE_SHARED`](crate::rules::TABLE_SHARED) for a target in a block that another sequence holds, too,
    /// [`BLOCK_UNCOPIED`](crate::rules::BLOCK_UNCOPIED) for a sequence whose blocks wait for copies,
    /// [`GROUP_LAYERS`](crate::rules::GROUP_LAYERS) for a sequence in the caches of several groups of layers, which has
    /// [`Attention::move_tokens`](crate::Attention::move_tokens),
    /// [`STATE_KEPT`](crate::rules::STATE_KEPT) for a sequence of a model with layers of linear attention,
    /// [`CACHE_PAIRED`](crate::rules::CACHE_PAIRED) for a cache of a [`SparseLatent`](crate::SparseLatent), which has
    /// [`SparseLatent::move_tokens`](crate::SparseLatent::move_tokens);
    /// [`CACHE_QUANTISED`](crate::rules::CACHE_QUANTISED) for a cache of [MXFP8](PagedKvCache::mxfp8): nothing is
    /// moved then. [`Acl`](ascend_attention::Error::Acl).
    ///
    /// [`Sequence::truncate`]: crate::kv::Sequence::truncate
    pub fn move_tokens(
        &mut self,
        stream: &Stream,
        sequence: &Sequence,
        moves: impl IntoIterator<Item = (usize, usize)>,
    ) -> Result<()> {
        sequence.check_groups(1)?;
        if self.entry().is_paired() {
            let given = "tokens that move in one of the two caches of sparse attention alone";
            return Err(rules::CACHE_PAIRED.broken(given, "tokens that move in both").into());
        }
        move_in_caches(stream, sequence, moves, [(&*self, sequence)])
    }

    /// Refuses moves of tokens that the sequence cannot move in this cache. Nothing is moved.
    fn check_moves(&self, stream: &Stream, sequence: &Sequence, moves: &[(usize, usize)]) -> Result<CheckedMoves> {
        self.admits(stream)?;
        self.holds(sequence)?;
        if self.has_groups() {
            return Err(Violation::new(
                &rules::CACHE_QUANTISED,
                "tokens that move in a cache of MXFP8",
                "a cache whose tokens have scales of their own, or of channels",
                "verify chains of drafts: values share powers of two with 31 others, which a token that moves would \
                 take along",
            )
            .into());
        }
        if let Some(block) = sequence.uncopied_in(self.entry()) {
            return Err(uncopied(format_args!("tokens that move, and block {block}")).into());
        }
        let computed = self.entry().computed_tokens(sequence.stamp());
        let targets = moves.iter().filter(|(from, to)| from != to).map(|(_, to)| *to);
        // Without a target the record keeps nothing from beginning.
        let first = targets.min().unwrap_or(usize::MAX);
        let Some(progress) = StepProgress::begin_moves(self.entry(), sequence.stamp(), first) else {
            return Err(Violation::new(
                &rules::SEQUENCE_IN_PROGRESS,
                "tokens to move of a sequence of which a step is in progress",
                "tokens that no step in progress reads",
                "queue all layers of the step in progress, or drop it, before tokens of its sequences are moved",
            )
            .into());
        };
        let block_size = self.pool().block_size();
        let moved = self.entry().moved(sequence.stamp());
        let (mut slots, mut targets) = (Vec::new(), 0..0);
        for &(from, to) in moves {
            let pair = (sequence.slot(from)?, sequence.slot(to)?);
            if from >= computed {
                return Err(Violation::new(
                    &rules::SEQUENCE_GAP,
                    format_args!(
                        "position {from} to move from, of a sequence whose first {computed} tokens are computed"
                    ),
                    "positions of computed tokens",
                    "move tokens once the step that computes them has queued its last layer; tokens that you wrote \
                     yourself, in every layer: name them first by `mark_computed`",
                )
                .into());
            }
            if from != to && moved.contains(&from) {
                let (first, last) = (moved.start, moved.end - 1);
                return Err(rules::SEQUENCE_MOVED
                    .broken(
                        format_args!(
                            "position {from} to move from, of a sequence in which tokens have moved to positions from \
                             {first} to {last}"
                        ),
                        format_args!(
                            "tokens in front of position {first}, or behind {last}, until the sequence is cut"
                        ),
                    )
                    .into());
            }
            let block = sequence.block(to / block_size);
            if block.is_some_and(Block::is_shared) {
                return Err(Violation::new(
                    &rules::TABLE_SHARED,
                    format_args!(
                        "position {to}, in a block that another sequence or a copy still to be queued reads, or \
                         that a step was writing when this sequence was forked"
                    ),
                    "positions in blocks of the sequence alone",
                    "queue the copies of each cache of the pool (`queue_pending_copies`); where another sequence \
                     or a prefix has the block, drop that first, or compute the tokens again in a sequence \
                     of their own, or behind a `truncate` and `grow` of this one, which copies the block",
                )
                .into());
            }
            if from != to {
                targets = spanning(&targets, &(to..to + 1));
                slots.push(pair);
            }
        }
        Ok(CheckedMoves { slots, targets, _progress: progress })
    }

    /// Queues the copies of moves that [`check_moves`](Self::check_moves) has checked.
    fn queue_moves(&self, stream: &Stream, moves: &CheckedMoves) -> Result<()> {
        let block_size = self.pool().block_size();
        let runs = runs_of(&moves.slots, block_size);
        // The blocks may be given back while the copies wait for the device.
        let _lease = self.pool().begin_step(stream);
        self.layers.iter().try_for_each(|layer| match layer {
            CacheLayer::Plain(layer) => layer.move_runs(stream, &runs, block_size),
            CacheLayer::Quantised { layer, .. } => layer.move_runs(stream, &runs, block_size),
        })
    }

    /// Records that a move has failed: some layers have other tokens than the rest from the first target on.
    fn lose_moved(&self, sequence: &Sequence, moves: &CheckedMoves) {
        self.entry().lose(sequence.stamp(), moves.targets.start);
    }
}

/// Queues copies of cached tokens of a sequence, each cache with the part of the sequence that it holds. Nothing is
/// moved unless every cache can move them; where a copy fails on the device, every cache loses what was to be moved.
pub(crate) fn move_in_caches<'a, T: Element>(
    stream: &Stream,
    sequence: &Sequence,
    moves: impl IntoIterator<Item = (usize, usize)>,
    caches: impl IntoIterator<Item = (&'a PagedKvCache<T>, &'a Sequence)>,
) -> Result<()> {
    let moves = listed_moves(sequence, moves)?;
    check_state_moves(sequence, &moves)?;
    let checked = caches.into_iter().map(|(cache, part)| Ok((cache, part, cache.check_moves(stream, part, &moves)?)));
    let checked = checked.collect::<Result<Vec<_>>>()?;
    let moved = checked.iter().try_for_each(|(cache, _, moves)| cache.queue_moves(stream, moves));
    for (cache, part, moves) in checked.iter().filter(|(_, _, moves)| !moves.slots.is_empty()) {
        match moved {
            Ok(()) => cache.entry().note_moved(part.stamp(), &moves.targets),
            Err(_) => cache.lose_moved(part, moves),
        }
    }
    moved
}

/// Moves within a sequence that may be queued.
#[derive(Debug)]
struct CheckedMoves {
    /// Slots to move from and to.
    slots: Vec<(usize, usize)>,
    /// The positions from the first to the last one that is moved to.
    targets: Range<usize>,
    /// Keeps steps of the sequence from beginning until the moves are queued and noted.
    _progress: StepProgress,
}

/// Refuses moves in a sequence with a state in layers of linear attention.
fn check_state_moves(sequence: &Sequence, moves: &[(usize, usize)]) -> Result<(), Violation> {
    match moves.first().filter(|_| sequence.state().is_some()) {
        None => Ok(()),
        Some((from, to)) => Err(Violation::new(
            &rules::STATE_KEPT,
            format_args!("token {from} moved to {to}"),
            "no moves: the state behind moved tokens is not kept",
            "draft chains, of which `truncate` takes the rejected end back",
        )),
    }
}

/// The moves of a list, up to one more than there are targets, so that an endless list ends. A pair that doubles or
/// loses a token that an earlier one has moved is refused.
fn listed_moves(
    sequence: &Sequence,
    moves: impl IntoIterator<Item = (usize, usize)>,
) -> Result<Vec<(usize, usize)>, Violation> {
    let mut listed = Vec::new();
    let (mut by_source, mut by_target) = (HashMap::new(), HashMap::new());
    for (from, to) in moves.into_iter().take(sequence.len().saturating_add(1)) {
        let earlier = by_source.get(&from).or(by_target.get(&to)).or(by_target.get(&from));
        if let Some(&(source, target)) = earlier {
            return Err(Violation::new(
                &rules::SEQUENCE_MOVED,
                format_args!("a move from {from} to {to}, behind one from {source} to {target}"),
                "each position once to move from and once to move to, from it in front of to it",
                match (from == source, to == target) {
                    (true, true) => "name each pair once",
                    (true, false) => "move the token to one position; compute it again where it is wanted twice",
                    (false, true) => "choose which of both tokens the position is to have, and name that one alone",
                    (false, false) if by_source.contains_key(&to) => {
                        "tokens cannot change places: move one of them, and compute the other again"
                    }
                    (false, false) => {
                        "name the pair that moves a token away in front of the one that moves another there"
                    }
                },
            ));
        }
        by_source.insert(from, (from, to));
        by_target.insert(to, (from, to));
        listed.push((from, to));
    }
    Ok(listed)
}

#[cfg(test)]
mod tests {
    use super::{SlotRun, runs_of};

    #[test]
    fn runs_stay_in_their_blocks_and_apart() {
        let run = |from, to, len| SlotRun { from, to, len };
        for (moves, runs) in [
            (&[][..], vec![]),
            (&[(5, 1), (6, 2), (7, 3)], vec![run(5, 1, 3)]),
            (&[(3, 1), (4, 2), (5, 3)], vec![run(3, 1, 2), run(5, 3, 1)]),
            (&[(7, 1), (8, 2)], vec![run(7, 1, 1), run(8, 2, 1)]),
            (&[(13, 7), (14, 8)], vec![run(13, 7, 1), run(14, 8, 1)]),
            (&[(5, 1), (7, 2)], vec![run(5, 1, 1), run(7, 2, 1)]),
        ] {
            assert_eq!(runs_of(moves, 8), runs);
        }
    }
}
