//! What the numbers of a position bias show of a call: an infinity or NaN, and a row without a key.

use super::{AttentionArguments, AttentionProblem, Padding, SequenceLengths, TensorRole, Work};
use crate::operator::Argument;
use crate::{DType, Rule, Target, TensorDesc, Violation};
use std::ops::Range;

/// A number of a position bias, and where it is.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct BiasNumber {
    /// The sequence.
    pub sequence: usize,
    /// The query head.
    pub head: usize,
    /// The row of the sequence.
    pub row: usize,
    /// The key of the sequence.
    pub key: usize,
    /// The number.
    pub value: f32,
}

/// What is wrong with the numbers of a position bias.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct BiasFaults {
    /// The first infinity or NaN.
    pub non_finite: Option<BiasNumber>,
    /// The first key of the first row that has the lowest finite number of the type for every key which it sees.
    pub hidden_row: Option<BiasNumber>,
}

/// How a type of a bias stores its numbers.
struct Float {
    sign: u32,
    /// All bits of the exponent: of an infinity, and with others of NaN.
    infinity: u32,
    /// The lowest finite number, and its bits.
    lowest: (f32, u32),
}

impl Float {
    fn of(dtype: DType) -> Option<Float> {
        let float = |sign, infinity, lowest, bits| Some(Float { sign, infinity, lowest: (lowest, bits) });
        match dtype {
            DType::Float16 => float(1 << 15, 0x7c00, -65504.0, 0xfbff),
            DType::Bf16 => float(1 << 15, 0x7f80, f32::from_bits(0xff7f_0000), 0xff7f),
            DType::Float => float(1 << 31, 0x7f80_0000, f32::MIN, 0xff7f_ffff),
            _ => None,
        }
    }

    fn non_finite(&self, bits: u32) -> f32 {
        match (bits & !self.sign == self.infinity, bits & self.sign == 0) {
            (false, _) => f32::NAN,
            (true, true) => f32::INFINITY,
            (true, false) => f32::NEG_INFINITY,
        }
    }
}

/// The elements of a bias for the keys that a row sees, `step` elements apart.
struct Seen {
    first: i64,
    step: i64,
    keys: Range<usize>,
    /// Whether these are all keys that the row sees, rather than those before the end of the bias.
    all: bool,
}

impl AttentionProblem<'_> {
    /// Looks at every number of a position bias that a row with its key reads, for the first that is not finite and
    /// the first row that it hides every key of. `bits` returns the bits of an element, counted from the base address,
    /// and is asked only for elements that the call [touches](AttentionProblem::touches).
    pub fn bias_faults(&self, padding: Padding, bits: impl Fn(i64) -> u32) -> BiasFaults {
        let mut faults = BiasFaults::default();
        let Some((bias, float)) = self.bias.and_then(|bias| Some((bias, Float::of(bias.rows.dtype)?))) else {
            return faults;
        };
        if self.work != Work::Attend || bias.rows.lanes != 0 {
            return faults;
        }
        let mut touched = None;
        self.touches(&mut |role, range| {
            if role == TensorRole::Bias {
                touched = range;
            }
        });
        let size = bias.rows.dtype.size().map_or(1, |size| size as u64);
        let elements = touched.map_or(0..0, |bytes| bytes.start.div_ceil(size)..bytes.end / size);
        let [batch, heads, ..] = bias.sizes;
        let heads = match self.terms.is_empty() && bias.rows.view.head == 0 {
            true => 1,
            false => self.heads.min(heads.max(1)),
        };
        // Sequences of all rows that share one bias read the same elements of it.
        let alike = batch == 1
            && self.terms.is_empty()
            && self.query_lengths == SequenceLengths::All
            && self.key_lengths == SequenceLengths::All;
        for sequence in 0..if alike { 1 } else { self.batch } {
            let rows = self.sequence(sequence, padding).q_len;
            for (head, row) in (0..heads).flat_map(|head| (0..rows).map(move |row| (head, row))) {
                let Some(seen) = self.seen_bias(sequence, padding, (head, row), &elements) else {
                    continue;
                };
                let Seen { first, step, keys, all } = seen;
                let at = |index: usize| bits(first.wrapping_add((index as i64).wrapping_mul(step)));
                let number = |index: usize, value| BiasNumber { sequence, head, row, key: keys.start + index, value };
                let count = keys.len();
                if faults.hidden_row.is_none() && all {
                    let (value, lowest) = float.lowest;
                    // Most rows see their first key or their last.
                    let mut ends = [0, count - 1].into_iter().chain(0..count);
                    faults.hidden_row = ends.all(|index| at(index) == lowest).then(|| number(0, value));
                }
                if faults.non_finite.is_none() {
                    let found = find(count, |index| at(index) & float.infinity == float.infinity);
                    faults.non_finite = found.map(|index| number(index, float.non_finite(at(index))));
                }
                if faults.hidden_row.is_some() && faults.non_finite.is_some() {
                    return faults;
                }
            }
        }
        faults
    }

    /// The elements for the keys that a row sees; `None` if it sees none, or if they are not within `elements`.
    fn seen_bias(
        &self,
        sequence: usize,
        padding: Padding,
        (head, row): (usize, usize),
        elements: &Range<u64>,
    ) -> Option<Seen> {
        let bias = self.bias?;
        let [_, _, rows, keys] = bias.sizes;
        let (first_row, first_key) = self.origin(&self.sequence(sequence, padding));
        let terms = self.terms_of(sequence).map(|terms| terms.bias);
        let element = |key: usize| match terms {
            Some(view) => Some(view?.element(head, row, key)),
            None => {
                let (row, key) = (first_row.checked_add(row)?, first_key.checked_add(key)?);
                (row < rows && key < keys).then(|| bias.rows.element((sequence, head, row), key))
            }
        };
        let seen = self.geometry(sequence).span(row as u64..row as u64 + 1);
        let (start, last_seen) = (seen.start as usize, seen.end as usize);
        // A bias may end before the keys do, or with the row's own key.
        let end = match terms {
            Some(_) if bias.up_to_row => row + 1,
            Some(_) => usize::MAX,
            None => keys.saturating_sub(first_key),
        };
        let end = end.min(last_seen);
        if end <= start {
            return None;
        }
        let (first, last) = (element(start)?, element(end - 1)?);
        let within = |element: i64| u64::try_from(element).is_ok_and(|element| elements.contains(&element));
        // A bias that ends before the keys do hides none of those behind it.
        let seen = || Seen {
            first,
            step: last.saturating_sub(first) / (end - start - 1).max(1) as i64,
            keys: start..end,
            all: end == last_seen,
        };
        (within(first) && within(last)).then(seen)
    }
}

/// Looks at chunks without a branch for each element, so that compilers vectorise the loop.
fn find(count: usize, is: impl Fn(usize) -> bool) -> Option<usize> {
    const CHUNK: usize = 64;
    let chunks = (0..count).step_by(CHUNK);
    let mut chunks = chunks.map(|start| start..count.min(start + CHUNK));
    let any = |chunk: &Range<usize>| chunk.clone().fold(false, |any, index| any | is(index));
    chunks.find(any)?.find(|&index| is(index))
}

/// The lints of an operator on the numbers of a position bias.
#[derive(Clone, Copy)]
pub(crate) struct BiasLints {
    /// An infinity or NaN.
    pub non_finite: &'static Rule,
    /// A row without a key.
    pub hidden_row: &'static Rule,
}

/// The tensor as its content is given to the lints: a bias in row-major order, the others as they are.
pub(crate) fn as_held<A: AttentionArguments>(argument: Argument<A::Parameter>, desc: &TensorDesc) -> TensorDesc {
    match A::of_role(TensorRole::Bias) == Some(argument) && !desc.is_contiguous() {
        true => TensorDesc::packed(desc.dtype, desc.shape),
        false => *desc,
    }
}

/// Reports the lints that the position bias of a call breaks. `bytes` returns the content of a tensor by its name,
/// little-endian in row-major order.
pub(crate) fn lint_bias<A: AttentionArguments>(
    arguments: &A,
    (version, target): (A::Version, Target),
    lints: BiasLints,
    bytes: &dyn Fn(&str) -> Option<Vec<u8>>,
    report: &mut dyn FnMut(Violation),
) {
    let name = |role| A::of_role(role).map(Argument::name);
    let Some(bias) = A::of_role(TensorRole::Bias).filter(|bias| arguments.tensor(*bias).is_some()) else {
        return;
    };
    let Ok(Some(problem)) = arguments.resolve(version, target, &mut |_| ()) else {
        return;
    };
    let Some((held, dtype)) = problem.bias.and_then(|read| Some((bytes(bias.name())?, read.rows.dtype))) else {
        return;
    };
    let padding = |role| {
        let held = name(role).and_then(bytes).unwrap_or_default();
        held.as_chunks().0.first().map_or(0, |size| i64::from_le_bytes(*size))
    };
    let padding = Padding {
        query: problem.query_padding.map_or(0, |_| padding(TensorRole::QueryPadding)),
        key: problem.key_padding.map_or(0, |_| padding(TensorRole::KeyPadding)),
    };
    let size = dtype.size().unwrap_or(1);
    let bits = |element: i64| {
        let start = usize::try_from(element).ok().and_then(|element| element.checked_mul(size));
        let stored = start.and_then(|start| held.get(start..start.checked_add(size)?));
        stored.map_or(0, |stored| stored.iter().rev().fold(0, |bits, &byte| bits << 8 | u32::from(byte)))
    };
    let faults = problem.bias_faults(padding, bits);
    if let Some(BiasNumber { sequence, head, row, key, value }) = faults.non_finite {
        let given = format_args!("{value} for sequence {sequence}, head {head}, row {row}, key {key}");
        report(lints.non_finite.broken(given, "finite numbers"));
    }
    if let Some(BiasNumber { sequence, head, row, value, .. }) = faults.hidden_row {
        let given = format_args!("{value} for every key of sequence {sequence}, head {head}, row {row}");
        report(lints.hidden_row.broken(given, "rows with a key of another number"));
    }
}
