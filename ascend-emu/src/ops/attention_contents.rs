//! Checks of the contents of an attention call's tensors, for misuse that its description does not show. Each check
//! costs little beside the attention itself, and runs in every mode: table entries are read once, a bias is read once
//! more, a mask up to the first row that sees its own key, and a template at some places of two rows and the diagonal.

use super::declared::{DeclaredOperator, Launch};
use crate::finding_kind::FindingKind;
use crate::kernel::{self, BlockIds, Buffers};
use crate::status::Outcome;
use ascend_spec::CompressedMask;
use ascend_spec::attention_problem::{AttentionProblem, BiasFaults, BiasNumber, MaskUse, TensorRole, Work};

/// Distance of the columns at which a compressed mask is looked at: another mask differs in long runs of bytes, and
/// every place on the diagonal is a page of its own.
const TEMPLATE_STEP: usize = 16;

/// The bytes of a call's tensor that may be read.
struct Bytes<'a>(&'a AttentionProblem<'a>, &'a Buffers<'a>);

impl Bytes<'_> {
    /// A row of the block table that names a block twice, with rows that are read for both columns. The first and the
    /// last column of a window may be two parts of one block.
    fn repeated_block(&self) -> Option<String> {
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
            let [(block, first), (_, second)] = [twice[0], twice[1]];
            Some(format!(
                "block table entries [{sequence}, {first}] and [{sequence}, {second}] name block {block} both, so that \
                 its keys count twice; give each part of a sequence a block of its own"
            ))
        })
    }

    fn bias_faults(&self) -> BiasFaults {
        let Bytes(problem, buffers) = self;
        let Some(bias) = problem.bias else {
            return BiasFaults::default();
        };
        let base = (buffers.0)(TensorRole::Bias);
        // SAFETY: a problem that attends touches its padding.
        let padding = unsafe { kernel::read_padding(problem, buffers) };
        match bias.rows.dtype.is_half() {
            true => problem.bias_faults(padding, |element| {
                let at = base.cast::<u16>().wrapping_offset(element as isize);
                // SAFETY: the element is within the bytes that the call touches, which are live.
                u32::from(unsafe { at.read_unaligned() })
            }),
            false => problem.bias_faults(padding, |element| {
                let at = base.cast::<u32>().wrapping_offset(element as isize);
                // SAFETY: as above; a type with faults is a half-precision one or FLOAT.
                unsafe { at.read_unaligned() }
            }),
        }
    }

    /// A byte of a compressed mask that is not its template's.
    fn wrong_template(&self) -> Option<String> {
        let Bytes(problem, buffers) = self;
        let (template, bytes) = (problem.mask_template()?, problem.mask_bytes()?);
        let [rows, columns] = [template.geometry().q_len(), template.geometry().kv_len()];
        let base = (buffers.0)(TensorRole::Mask);
        let sampled = || (0..columns).step_by(TEMPLATE_STEP);
        let ends = sampled().flat_map(|column| [(0, column), (rows - 1, column)]);
        let diagonal = sampled().flat_map(|row| [(row, row), (row, row + 1)]);
        ends.chain(diagonal).find_map(|(row, column)| {
            let hides = template.hides(row, column)?;
            let at = bytes.start + row * columns + column;
            // SAFETY: the bytes of the mask are live, and this is one of them: the template has as many.
            let byte = unsafe { base.wrapping_add(at as usize).read() };
            ((byte != 0) != hides).then(|| {
                let template = match template {
                    CompressedMask::Prefix => "ones above the diagonal, and in rows from 2048 on in the right half",
                    _ => "ones above the diagonal and zeros elsewhere",
                };
                format!(
                    "attenMask [{row}, {column}] is {byte}, but in sparse modes 2 to 4 and 6 to 8 attenMask is a \
                     template, {template}, from which the operator reads the mask of each tile; the emulation hides \
                     what the mode hides, and hardware what the tensor says: pass the template, or a full mask in \
                     sparse mode 1"
                )
            })
        })
    }

    /// A causal mask tensor with the opposite sense: each row sees only the keys after its own, and the last row sees
    /// none.
    fn hidden_row(&self) -> Option<String> {
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
                last = last.or(Some((sequence, row)));
            }
        }
        let (sequence, row) = last?;
        Some(format!(
            "attenMask hides every key from row {row} of sequence {sequence}, and from each row of each sequence its \
             own key and all before it, which a causal mask shows; in this tensor 0 shows a key and any other byte \
             hides it, so invert one whose bytes mean the opposite"
        ))
    }
}

/// Says that an element of a position bias is plus or minus infinity, or NaN.
fn non_finite_bias(BiasNumber { sequence, head, row, key, value }: BiasNumber) -> String {
    let why = match value == f32::NEG_INFINITY {
        false => "which makes NaN of the whole row; give a finite number",
        true => {
            "which hardware may make NaN of the whole row; hide keys with attenMask, or add the lowest finite number \
             of the type"
        }
    };
    format!("the position bias of sequence {sequence}, head {head}, row {row}, key {key} is {value}, {why}")
}

/// Says that a row of a position bias has the lowest number of its type for every key.
fn hiding_bias(BiasNumber { sequence, head, row, value, .. }: BiasNumber) -> String {
    format!(
        "the position bias of sequence {sequence}, head {head}, row {row} is {value} for every key: softmax weighs \
         keys by differences, so that the row becomes a mean of hidden values; hide keys with attenMask, and leave \
         out rows that see none"
    )
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
) -> Outcome {
    if problem.work != Work::Attend {
        return Ok(());
    }
    let shown = Bytes(problem, buffers);
    // SAFETY: the caller's promise.
    let bad = unsafe { kernel::bad_block(problem, buffers) };
    let BiasFaults { non_finite, hidden_row, .. } = shown.bias_faults();
    let found = [
        (FindingKind::BlockTable, TensorRole::BlockTable, bad.map(|bad| bad.to_string())),
        (FindingKind::RepeatedBlock, TensorRole::BlockTable, shown.repeated_block()),
        (FindingKind::NonFiniteBias, TensorRole::Bias, non_finite.map(non_finite_bias)),
        (FindingKind::HiddenRow, TensorRole::Bias, hidden_row.map(hiding_bias)),
        (FindingKind::HiddenRow, TensorRole::Mask, shown.hidden_row()),
        (FindingKind::MaskTemplate, TensorRole::Mask, shown.wrong_template()),
    ];
    for (kind, role, text) in found {
        if let Some((text, name)) = text.zip(name(role)) {
            launch.suspect(kind, name, text)?;
        }
    }
    Ok(())
}
