//! Rows divided over ranks so that causal attention is as much work on each.

use std::ops::Range;

/// The rows that `rank` has of `rows` rows in order: chunk `rank` and chunk `2 P - 1 - rank` of `2 P` for `P` ranks,
/// since a late chunk sees more keys than an early one. Chunks differ by one row where the number does not divide, the
/// first ones having more. None for a rank that does not exist.
pub(super) fn zigzag(ranks: usize, rank: usize, rows: usize) -> [Range<usize>; 2] {
    let chunks = 2 * ranks;
    let start = |chunk: usize| chunk * (rows / chunks) + chunk.min(rows % chunks);
    match rank < ranks {
        true => [rank, chunks - 1 - rank].map(|chunk| start(chunk)..start(chunk + 1)),
        false => [0..0, 0..0],
    }
}

/// What `rank` has of several sequences with these rows, in the order in which it passes them: which sequence, and the
/// rows of a chunk of it. Empty chunks are left out.
pub(super) fn chunks(
    ranks: usize,
    rank: usize,
    sequences: impl IntoIterator<Item = usize>,
) -> impl Iterator<Item = (usize, Range<usize>)> {
    let of_each = sequences.into_iter().enumerate();
    let chunks = of_each.flat_map(move |(at, rows)| zigzag(ranks, rank, rows).map(|chunk| (at, chunk)));
    chunks.filter(|(_, chunk)| !chunk.is_empty())
}
