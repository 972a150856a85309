//! Other ways to make the same call.

use std::ops::Range;

use ascend_attention::case::Case;
use ascend_attention::spec::Target;

use super::chunks::chunks;
use super::pages::paged;
use super::sequences::Sequences;

/// Query rows of a call in which a prompt is computed piece by piece.
const CHUNKS: [usize; 4] = [1, 16, 64, 256];

/// Tokens in a block of a paged cache.
const BLOCKS: [usize; 5] = [16, 32, 64, 128, 256];

/// Calls that compute what one call does.
pub(super) struct Variation {
    pub(super) name: String,
    /// The calls, or why there are none.
    pub(super) pieces: Result<Vec<Piece>, String>,
}

/// A call on some of the original's rows.
pub(super) struct Piece {
    pub(super) case: Case,
    /// Of each sequence of the call: the original's sequence, and which of its rows.
    pub(super) rows: Vec<(usize, Range<usize>)>,
}

/// Every variation of batch, chunks and pages.
pub(super) fn variations(of: &Sequences, target: Target) -> Vec<Variation> {
    let count = of.count();
    let whole: Vec<usize> = (0..count).collect();
    let several = |pieces: &dyn Fn() -> Result<Vec<Piece>, String>| match count {
        1 => Err("the case has one sequence".to_owned()),
        _ => pieces(),
    };
    let mut all = vec![
        variation("again", Ok(vec![piece(of, of.case().clone(), &whole)])),
        variation(
            "each sequence alone",
            several(&|| whole.iter().map(|&b| batch(of, &[b])).collect()),
        ),
        variation(
            "batch in reverse",
            several(&|| {
                let reverse: Vec<usize> = whole.iter().rev().copied().collect();
                Ok(vec![batch(of, &reverse)?])
            }),
        ),
        variation(
            "batch twice",
            batch(of, &[whole.clone(), whole.clone()].concat()).map(|piece| vec![piece]),
        ),
    ];
    let longest = whole.iter().map(|&b| of.rows(b).q_len).max().unwrap_or(0);
    // A chunk that holds the longest sequence is the call as it stands.
    let cutting = CHUNKS.into_iter().filter(|&size| size < longest);
    all.extend(
        cutting.map(|size| variation(&format!("chunks of {size}"), in_chunks(of, size, target))),
    );
    if longest <= 1 {
        all.push(variation(
            "chunks",
            Err("no sequence has several query rows".to_owned()),
        ));
    }
    for size in BLOCKS {
        for (reverse, order) in [(false, ""), (true, " in reverse")] {
            let pieces = paged(of, size, reverse).map(|case| vec![piece(of, case, &whole)]);
            all.push(variation(&format!("blocks of {size}{order}"), pieces));
        }
    }
    all
}

fn variation(name: &str, pieces: Result<Vec<Piece>, String>) -> Variation {
    Variation {
        name: name.to_owned(),
        pieces,
    }
}

/// One call on these sequences.
fn batch(of: &Sequences, order: &[usize]) -> Result<Piece, String> {
    Ok(piece(of, of.select(order)?, order))
}

/// A call that computes all rows of these sequences.
fn piece(of: &Sequences, case: Case, order: &[usize]) -> Piece {
    let rows = order.iter().map(|&b| (b, 0..of.rows(b).q_len));
    Piece {
        case,
        rows: rows.collect(),
    }
}

/// Every sequence in calls of at most `size` rows.
fn in_chunks(of: &Sequences, size: usize, target: Target) -> Result<Vec<Piece>, String> {
    let mut pieces = Vec::new();
    for b in 0..of.count() {
        for (case, rows) in chunks(of, b, size, target)? {
            pieces.push(Piece {
                case,
                rows: vec![(b, rows)],
            });
        }
    }
    Ok(pieces)
}
