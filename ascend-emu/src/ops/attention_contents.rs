//! Checks of the contents of an attention call's tensors, for misuse that its description does not show. Each check
//! costs little beside the attention itself, and runs in every mode: table entries are read once, a bias is read once
//! more, and a mask up to the first row that sees its own key.

use super::declared::DeclaredOperator;
use super::launch::Launch;
use crate::fault::Fault;
use crate::finding_kind::FindingKind;
use crate::kernel::{self, BlockIds, Buffers};
use ascend_spec::DType;
use ascend_spec::attention_problem::{AttentionProblem, BiasRows, MaskUse, SequenceLengths, TensorRole, Work};
use half::{bf16, f16};
use std::fmt;
use std::ops::Range;

/// A row of the block table that names a block twice, with rows that are read for both columns. The first and the
/// last column of a window may be two parts of one block.
struct RepeatedBlock {
    sequence: usize,
    columns: [usize; 2],
    block: usize,
}

impl fmt::Display for RepeatedBlock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let RepeatedBlock { sequence, columns: [first, second], block } = self;
        write!(
            f,
            "block table entries [{sequence}, {first}] and [{sequence}, {second}] name block {block} both, so that its \
             keys count twice; give each part of a sequence a block of its own"
        )
    }
}

/// An element of a position bias that is plus or minus infinity, or NaN.
struct NonFiniteBias {
    sequence: usize,
    head: usize,
    row: usize,
    key: usize,
    value: f32,
}

impl fmt::Display for NonFiniteBias {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let NonFiniteBias { sequence, head, row, key, value } = self;
        write!(f, "the position bias of sequence {sequence}, head {head}, row {row}, key {key} is {value}, ")?;
        f.write_str(match *value == f32::NEG_INFINITY {
            false => "which makes NaN of the whole row; give a finite number",
            true => {
                "which hardware may make NaN of the whole row; hide keys with attenMask, or add the lowest finite \
                 number of the type"
            }
        })
    }
}

/// A causal mask tensor with the opposite sense: each row sees only the keys after its own, and the last row sees
/// none.
struct HiddenRow {
    sequence: usize,
    row: usize,
}

impl fmt::Display for HiddenRow {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "attenMask hides every key from row {} of sequence {}, and from each row of each sequence its own key and \
             all before it, which a causal mask shows; in this tensor 0 shows a key and any other byte hides it, so \
             invert one whose bytes mean the opposite",
            self.row, self.sequence
        )
    }
}

/// A row of a position bias that has the lowest number of its type for every key.
struct HidingBias {
    sequence: usize,
    head: usize,
    row: usize,
    value: f32,
}

impl fmt::Display for HidingBias {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let HidingBias { sequence, head, row, value } = self;
        write!(
            f,
            "the position bias of sequence {sequence}, head {head}, row {row} is {value} for every key: softmax weighs \
             keys by differences, so that the row becomes a mean of hidden values; hide keys with attenMask, and leave \
             out rows that see none"
        )
    }
}

/// What is wrong with a position bias.
#[derive(Default)]
struct BiasFaults {
    non_finite: Option<NonFiniteBias>,
    hiding: Option<HidingBias>,
}

/// The elements of a row, `step` elements of the type apart.
#[derive(Clone, Copy)]
struct BiasRow {
    dtype: DType,
    first: *const u8,
    step: isize,
    count: usize,
}

impl BiasRow {
    /// The number at an index.
    ///
    /// # Safety
    ///
    /// The element may be read; alignment is not required.
    unsafe fn at(self, index: usize) -> f32 {
        let place = index as isize * self.step;
        // SAFETY: the caller's promise.
        unsafe {
            let half = || {
                let element = self.first.cast::<u16>().wrapping_offset(place);
                element.read_unaligned()
            };
            match self.dtype {
                DType::Float16 => f16::from_bits(half()).to_f32(),
                DType::Bf16 => bf16::from_bits(half()).to_f32(),
                _ => {
                    let element = self.first.cast::<f32>().wrapping_offset(place);
                    element.read_unaligned()
                }
            }
        }
    }

    /// The lowest finite number of the type, if every element is it.
    ///
    /// # Safety
    ///
    /// Each of the elements may be read; alignment is not required.
    unsafe fn hides_all(self) -> Option<f32> {
        let lowest = match self.dtype {
            DType::Float16 => f16::MIN.to_f32(),
            DType::Bf16 => bf16::MIN.to_f32(),
            DType::Float => f32::MIN,
            _ => return None,
        };
        // Most rows see their first key or their last.
        let mut ends = [0, self.count - 1].into_iter().chain(0..self.count);
        // SAFETY: the caller's promise, for each of the elements.
        ends.all(|index| unsafe { self.at(index) } == lowest).then_some(lowest)
    }
}

/// The first infinity or NaN of a row: its index and its value.
///
/// # Safety
///
/// Each of the elements may be read; alignment is not required.
unsafe fn first_non_finite(row: BiasRow) -> Option<(usize, f32)> {
    /// Looks at chunks without a branch for each element, so that compilers vectorise the loop.
    fn find(count: usize, non_finite: impl Fn(usize) -> bool) -> Option<usize> {
        const CHUNK: usize = 64;
        let chunks = (0..count).step_by(CHUNK);
        let mut chunks = chunks.map(|start| start..count.min(start + CHUNK));
        let any = |chunk: &Range<usize>| chunk.clone().fold(false, |any, index| any | non_finite(index));
        chunks.find(any)?.find(|&index| non_finite(index))
    }
    let BiasRow { dtype, first, step, count } = row;
    let place = |index: usize| index as isize * step;
    // SAFETY: the caller's promise, for each of the elements.
    unsafe {
        let half = |index| first.cast::<u16>().wrapping_offset(place(index)).read_unaligned();
        let float = |index| first.cast::<f32>().wrapping_offset(place(index)).read_unaligned();
        // All bits of the exponent.
        let found = match dtype {
            DType::Float16 => find(count, |index| half(index) & 0x7c00 == 0x7c00),
            DType::Bf16 => find(count, |index| half(index) & 0x7f80 == 0x7f80),
            DType::Float => find(count, |index| !float(index).is_finite()),
            _ => None,
        }?;
        Some((found, row.at(found)))
    }
}

/// The bytes of a call's tensor that may be read.
struct Bytes<'a>(&'a AttentionProblem<'a>, &'a Buffers<'a>);

impl Bytes<'_> {
    fn repeated_block(&self) -> Option<RepeatedBlock> {
        let Bytes(problem, buffers) = self;
        let pages = problem.pages.as_ref()?;
        let size = pages.block_size.max(1);
        let mut named: Vec<(usize, usize)> = Vec::new();
        (0..problem.batch).find_map(|sequence| {
            let seen = problem.geometry(sequence).span(0..problem.q_len(sequence) as u64);
            let own = |key: u64| (key as usize).saturating_sub(problem.prefix.map_or(0, |prefix| prefix.len));
            let (start, end) = (own(seen.start), own(seen.end));
            if end <= size {
                return None;
            }
            // SAFETY: a problem that attends touches its block table.
            let blocks = unsafe { BlockIds::read(buffers, pages, sequence, end) }.ok()?;
            let columns = start / size..end.div_ceil(size);
            named.clear();
            named.try_reserve(columns.len()).ok()?;
            let entries = columns.filter_map(|column| Some((blocks.find(column * size)?.0, column)));
            // Engines fill tables with zeros, and zeros also replace the blocks that a window has left.
            named.extend(entries.filter(|&(block, _)| block != 0));
            named.sort_unstable();
            // Rows of a block that are read for a column.
            let first = |column: usize| start.saturating_sub(column * size);
            let behind = |column: usize| (end - column * size).min(size);
            let twice = named.windows(2).find(|pair| {
                let [(one, low), (other, high)] = [pair[0], pair[1]];
                one == other && first(low).max(first(high)) < behind(low).min(behind(high))
            })?;
            Some(RepeatedBlock { sequence, columns: [twice[0].1, twice[1].1], block: twice[0].0 })
        })
    }

    /// Looks through a position bias for the first number that is not finite and the first row that it hides every key
    /// of.
    fn bias_faults(&self) -> BiasFaults {
        let mut faults = BiasFaults::default();
        // What cannot be read has no faults.
        let _ = self.look_for_bias_faults(&mut faults);
        faults
    }

    fn look_for_bias_faults(&self, faults: &mut BiasFaults) -> Option<()> {
        let Bytes(problem, buffers) = self;
        let bias = problem.bias?;
        let mut touched = None;
        problem.touches(&mut |role, range| {
            if role == TensorRole::Bias {
                touched = range;
            }
        });
        let (bytes, dtype) = (touched?, bias.rows.dtype);
        let size = dtype.size().filter(|_| bias.rows.lanes == 0)? as i64;
        let base = (buffers.0)(TensorRole::Bias);
        // SAFETY: a problem that attends touches its padding.
        let padding = unsafe { kernel::read_padding(problem, buffers) };
        let [batch, heads, rows, keys] = bias.sizes;
        let heads = match problem.terms.is_empty() && bias.rows.view.head == 0 {
            true => 1,
            false => problem.heads.min(heads.max(1)),
        };
        // Sequences of all rows that share one bias read the same elements of it.
        let alike = batch == 1
            && problem.terms.is_empty()
            && problem.query_lengths == SequenceLengths::All
            && problem.key_lengths == SequenceLengths::All;
        let sequences = if alike { 1 } else { problem.batch };
        let all = problem.sequences(padding).take(sequences).enumerate();
        for (sequence, (extent, _)) in all {
            let geometry = problem.geometry(sequence);
            let (first_row, first_key) = problem.origin(&extent);
            let element = |head: usize, row: usize, key: usize| match problem.terms_of(sequence) {
                Some(terms) => terms.bias?.element(head, row, key),
                None => {
                    let place = (sequence, head, first_row + row);
                    (place.2 < rows && first_key + key < keys).then(|| bias.rows.element(place, first_key + key))
                }
            };
            for (head, row) in (0..heads).flat_map(|head| (0..extent.q_len).map(move |row| (head, row))) {
                let seen = geometry.span(row as u64..row as u64 + 1);
                let start = seen.start as usize;
                // A bias may end before the keys do, or with the row's own key.
                let end = match problem.terms_of(sequence).and_then(|terms| terms.bias) {
                    Some(BiasRows { up_to_row: true, .. }) => row + 1,
                    Some(_) => usize::MAX,
                    None => keys.saturating_sub(first_key),
                };
                let end = end.min(seen.end as usize);
                if end <= start {
                    continue;
                }
                let (Some(first), Some(last)) = (element(head, row, start), element(head, row, end - 1)) else {
                    continue;
                };
                let step = last.saturating_sub(first) / (end - start - 1).max(1) as i64;
                let byte = |element: i64| u64::try_from(element.saturating_mul(size)).ok();
                let (low, high) = (byte(first.min(last)), byte(first.max(last).saturating_add(1)));
                if !(low.is_some_and(|low| bytes.start <= low) && high.is_some_and(|high| high <= bytes.end)) {
                    continue;
                }
                let first = base.wrapping_offset((first * size) as isize);
                let elements = BiasRow { dtype, first, step: step as isize, count: end - start };
                // A bias that ends before the keys do hides none of those behind it.
                if faults.hiding.is_none() && end == seen.end as usize {
                    // SAFETY: the elements from the first to the last are within the bytes of the bias, which are live.
                    faults.hiding =
                        unsafe { elements.hides_all() }.map(|value| HidingBias { sequence, head, row, value });
                }
                if faults.non_finite.is_none() {
                    // SAFETY: the elements from the first to the last are within the bytes of the bias, which are live.
                    let found = unsafe { first_non_finite(elements) };
                    faults.non_finite =
                        found.map(|(key, value)| NonFiniteBias { sequence, head, row, key: start + key, value });
                }
                if faults.hiding.is_some() && faults.non_finite.is_some() {
                    return Some(());
                }
            }
        }
        Some(())
    }

    fn hidden_row(&self) -> Option<HiddenRow> {
        let Bytes(problem, buffers) = self;
        // Where such rows are written as 0, a mask may hide whole rows on purpose.
        if problem.zeroes_masked_rows || !matches!(problem.mask, MaskUse::Full(_) | MaskUse::OfSequences) {
            return None;
        }
        let bytes = problem.mask_bytes()?;
        let base = (buffers.0)(TensorRole::Mask);
        // SAFETY: a problem that attends touches its padding.
        let padding = unsafe { kernel::read_padding(problem, buffers) };
        let mut last = None;
        for (sequence, (extent, mask)) in problem.sequences(padding).enumerate() {
            let (mask, keys) = (mask?, extent.keys());
            let hides = |row: usize, key: usize| {
                let element = mask.element(row, key)?;
                let element = u64::try_from(element).ok();
                let element = element.filter(|element| bytes.contains(element))?;
                // SAFETY: the bytes of the mask are live, and this is one of them.
                Some(unsafe { base.wrapping_add(element as usize).read() } != 0)
            };
            for row in 0..extent.q_len {
                let own = (row + keys).checked_sub(extent.q_len)?;
                // The own key first, because nearly every mask shows it.
                let mut all = std::iter::once(own).chain(0..keys);
                if !all.all(|key| hides(row, key) == Some(key <= own)) {
                    return None;
                }
            }
            if extent.q_len > 1 {
                let row = extent.q_len - 1;
                last = last.or(Some(HiddenRow { sequence, row }));
            }
        }
        last
    }
}

/// Reports the misuse that the contents of a call's tensors show. In strict mode the first one is a device fault.
///
/// # Safety
///
/// As for [`kernel::run`].
pub(super) unsafe fn inspect<O: DeclaredOperator>(
    launch: &Launch<'_, O>,
    problem: &AttentionProblem<'_>,
    buffers: &Buffers<'_>,
    name: &dyn Fn(TensorRole) -> Option<&'static str>,
) -> Result<(), Fault> {
    if problem.work != Work::Attend {
        return Ok(());
    }
    let suspect = |kind, role, text: Option<&dyn fmt::Display>| match text.zip(name(role)) {
        Some((text, name)) => launch.suspect(kind, name, text),
        None => Ok(()),
    };
    let shown = Bytes(problem, buffers);
    // SAFETY: the caller's promise.
    let bad = unsafe { kernel::bad_block(problem, buffers) };
    let (repeated, bias) = (shown.repeated_block(), shown.bias_faults());
    let hidden = shown.hidden_row();
    let found = [
        (FindingKind::BlockTable, TensorRole::BlockTable, bad.as_ref().map(|text| text as &dyn fmt::Display)),
        (FindingKind::RepeatedBlock, TensorRole::BlockTable, repeated.as_ref().map(|text| text as _)),
        (FindingKind::NonFiniteBias, TensorRole::Bias, bias.non_finite.as_ref().map(|text| text as _)),
        (FindingKind::HiddenRow, TensorRole::Bias, bias.hiding.as_ref().map(|text| text as _)),
        (FindingKind::HiddenRow, TensorRole::Mask, hidden.as_ref().map(|text| text as _)),
    ];
    found.into_iter().try_for_each(|(kind, role, text)| suspect(kind, role, text))
}
