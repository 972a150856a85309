//! Other ways to make the same call.

use std::ops::Range;

use ascend_attention::case::AttentionCase;
use ascend_attention::spec::Target;

use super::chunks::chunk;
use super::pages::paged;
use super::sequences::Sequences;

/// Numbers of query rows in a chunk when a prompt is computed in chunks.
const CHUNKS: [usize; 4] = [1, 16, 64, 256];

/// Numbers of tokens in a block of a paged cache.
const BLOCKS: [usize; 5] = [16, 32, 64, 128, 256];

/// Most calls of a variation.
const MOST_CALLS: usize = 1024;

/// Calls that together compute the same as one call.
pub(super) struct Variation {
    pub(super) name: String,
    /// The calls, or why there are none.
    pub(super) calls: Result<Vec<Call>, String>,
}

/// How to make a call from the original. Calls are made one at a time, since each holds a copy of the keys.
pub(super) enum Call {
    /// The original once more.
    Again,
    /// The call on these sequences.
    Batch(Vec<usize>),
    /// The call on some rows of a sequence.
    Chunk(usize, Range<usize>),
    /// The call with its keys in blocks of this number of tokens, in the order of the sequences or in reverse order.
    Blocks(usize, bool),
}

/// A call on some of the original's rows.
pub(super) struct Piece {
    pub(super) case: AttentionCase,
    /// For each sequence of the call, the original's sequence and the range of its rows.
    pub(super) rows: Vec<(usize, Range<usize>)>,
}

impl Call {
    /// Makes the call.
    ///
    /// # Errors
    /// The part of the original that cannot be taken apart.
    pub(super) fn make(&self, original: &Sequences, target: Target) -> Result<Piece, String> {
        let all: Vec<usize>;
        let (case, order) = match self {
            Call::Chunk(sequence, rows) => {
                return Ok(Piece {
                    case: chunk(original, *sequence, rows.clone(), target)?,
                    rows: vec![(*sequence, rows.clone())],
                });
            }
            Call::Batch(order) => (original.select(order)?, order),
            Call::Again | Call::Blocks(..) => {
                all = (0..original.count()).collect();
                let case = match self {
                    Call::Blocks(size, reverse) => paged(original, *size, *reverse)?,
                    _ => original.case().clone(),
                };
                (case, &all)
            }
        };
        let rows = order.iter().map(|&b| (b, 0..original.rows(b).q_len));
        Ok(Piece { case, rows: rows.collect() })
    }
}

/// Every variation of batch, chunks and pages.
pub(super) fn variations(original: &Sequences) -> Vec<Variation> {
    let whole: Vec<usize> = (0..original.count()).collect();
    let several = |calls: Vec<Call>| match original.count() {
        1 => Err("the case has one sequence".to_owned()),
        _ => Ok(calls),
    };
    let reverse = whole.iter().rev().copied().collect();
    let twice = [&whole[..], &whole].concat();
    let alone = whole.iter().map(|&b| Call::Batch(vec![b])).collect();
    let mut all = vec![
        variation("again", Ok(vec![Call::Again])),
        variation("each sequence alone", several(alone)),
        variation("batch in reverse", several(vec![Call::Batch(reverse)])),
        variation("batch twice", Ok(vec![Call::Batch(twice)])),
    ];
    let longest = whole.iter().map(|&b| original.rows(b).q_len).max().unwrap_or(0);
    // A chunk that holds the longest sequence is the call as it stands.
    let cutting = CHUNKS.into_iter().filter(|&size| size < longest);
    all.extend(cutting.map(|size| {
        let calls =
            whole.iter().flat_map(|&b| chunks(original.rows(b).q_len, size).map(move |rows| Call::Chunk(b, rows)));
        variation(&format!("chunks of {size}"), Ok(calls.collect()))
    }));
    if longest <= 1 {
        let why = "no sequence has several query rows".to_owned();
        all.push(variation("chunks", Err(why)));
    }
    for size in BLOCKS {
        for (reverse, order) in [(false, ""), (true, " in reverse")] {
            let calls = vec![Call::Blocks(size, reverse)];
            all.push(variation(&format!("blocks of {size}{order}"), Ok(calls)));
        }
    }
    all
}

/// The rows in runs of at most `size`.
fn chunks(rows: usize, size: usize) -> impl Iterator<Item = Range<usize>> {
    let firsts = (0..rows).step_by(size);
    firsts.map(move |first| first..rows.min(first + size))
}

fn variation(name: &str, calls: Result<Vec<Call>, String>) -> Variation {
    let calls = calls.and_then(|calls| match calls.len() {
        0..=MOST_CALLS => Ok(calls),
        count => Err(format!("it would take {count} calls, and {MOST_CALLS} are made at most")),
    });
    Variation { name: name.to_owned(), calls }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_cover_all_rows_and_their_number_is_bounded() {
        assert_eq!(chunks(7, 3).collect::<Vec<_>>(), [0..3, 3..6, 6..7]);
        assert_eq!(chunks(0, 3).count(), 0);
        let calls = |count: usize| variation("many", Ok((0..count).map(|_| Call::Again).collect()));
        assert!(calls(MOST_CALLS).calls.is_ok());
        let why = calls(MOST_CALLS + 1).calls.err().unwrap();
        assert!(why.starts_with("it would take 1025 calls"), "{why}");
    }
}
