//! The keys of a call in a paged cache of other blocks.

use ascend_attention::case::{AttentionCase, CaseTensor, Parameter};
use ascend_attention::spec::DType;
use ascend_attention::spec::attention_problem::MaskUse;
use ascend_attention::spec::ops::fused_infer_attention_score::AntiquantMode;

use super::sequences::Sequences;

/// The call with its keys and values in blocks of `block_size` tokens, in the order of the sequences or in reverse
/// order.
///
/// # Errors
/// The part of the case that cannot be stored in pages.
pub(super) fn paged(original: &Sequences, block_size: usize, reverse: bool) -> Result<AttentionCase, String> {
    let problem = &original.problem;
    if problem.key_padding.is_some() || problem.query_padding.is_some() {
        return Err("the sequences are left padded".to_owned());
    }
    if problem.prefix.is_some() {
        return Err("a shared prefix lies in no pages".to_owned());
    }
    let arguments = &original.case().arguments;
    let in_pages = |mode| {
        use AntiquantMode::{PerTokenHeadPaged, PerTokenPaged};
        matches!(mode, Some(PerTokenPaged | PerTokenHeadPaged))
    };
    let scales = (arguments.each_tensor()).find(|(argument, _)| in_pages(original.antiquant_mode(argument.parameter)));
    if let Some((argument, _)) = scales {
        return Err(format!("{} lies in pages, too", argument.name()));
    }
    let lengths: Vec<usize> = (0..original.count()).map(|b| original.rows(b).kv_len).collect();
    let counts = lengths.iter().map(|len| len.div_ceil(block_size));
    let columns = counts.clone().max().unwrap_or(0).max(1);
    let total: usize = counts.clone().sum();
    let blocks = total.max(1);
    let mut table = vec![0i32; original.count() * columns];
    let mut next = 0;
    for (row, count) in table.chunks_mut(columns).zip(counts) {
        for entry in &mut row[..count] {
            let block = if reverse { total - 1 - next } else { next };
            *entry = i32::try_from(block).map_err(|_| "there are too many blocks".to_owned())?;
            next += 1;
        }
    }
    let pages = Pages { block_size, blocks, columns, table: &table, lengths: &lengths };
    let mut case = original.case().clone();
    let new = &mut case.arguments;
    new.key = vec![pages.filled(original, Parameter::Key)?];
    new.value = vec![pages.filled(original, Parameter::Value)?];
    if new.key_rope.is_some() {
        new.key_rope = Some(pages.filled(original, Parameter::KeyRope)?);
    }
    // Mask and bias cover all keys that the table's rows can name.
    let keys = columns * block_size;
    if let (MaskUse::Full(_), Some(mask)) = (problem.mask, &new.atten_mask) {
        new.atten_mask = Some(widened(mask, keys, 1)?);
    }
    if let Some(bias) = &new.pse_shift {
        new.pse_shift = Some(widened(bias, keys, 0)?);
    }
    let table: Vec<u8> = table.iter().flat_map(|id| id.to_le_bytes()).collect();
    let table = CaseTensor::new(DType::Int32, &[original.count(), columns], table);
    new.block_table = Some(table.map_err(|error| error.to_string())?);
    new.block_size = block_size as i64;
    new.actual_seq_lengths_kv = Some(lengths.iter().map(|&len| len as i64).collect());
    Ok(case)
}

/// The sizes of a paged cache, and the tokens that its blocks hold.
struct Pages<'a> {
    block_size: usize,
    blocks: usize,
    columns: usize,
    table: &'a [i32],
    lengths: &'a [usize],
}

impl Pages<'_> {
    /// Keys, values or rotary parts of all sequences, as `[blocks, block_size, heads * dim]`.
    fn filled(&self, original: &Sequences, parameter: Parameter) -> Result<CaseTensor, String> {
        let problem = &original.problem;
        let dim = match parameter {
            Parameter::Key => problem.head_dim,
            Parameter::Value => problem.value_dim,
            _ => problem.rope_dim,
        };
        let heads = problem.kv_heads;
        let first = original.case().arguments.tensor(parameter);
        let dtype = first.map_or(DType::Undefined, CaseTensor::dtype);
        let size =
            dtype.size().filter(|_| dtype != DType::Int32).ok_or_else(|| format!("{dtype} elements share bytes"))?;
        let row = heads * dim * size;
        let mut bytes = vec![0; self.blocks * self.block_size * row];
        for (b, &len) in self.lengths.iter().enumerate() {
            let own = problem.key_value(b);
            let rows = match parameter {
                Parameter::Key => own.key,
                Parameter::Value => own.value,
                _ => own.key_rope.ok_or("there is no rotary part")?,
            };
            let index = match parameter {
                Parameter::KeyRope => 0,
                _ => own.list_index,
            };
            let list = original.case().arguments.tensors(parameter);
            let tensor = list.get(index).ok_or("the list is too short")?;
            for token in 0..len {
                let column = token / self.block_size;
                let block = self.table[b * self.columns + column] as usize;
                let to = (block * self.block_size + token % self.block_size) * row;
                let (batch, at) = place(original, b, token)?;
                for head in 0..heads {
                    let target = &mut bytes[to + head * dim * size..][..dim * size];
                    for (d, out) in target.chunks_mut(size).enumerate() {
                        let from = rows.element((batch, head, at), d) as usize * size;
                        let found = tensor.bytes().get(from..from + size);
                        out.copy_from_slice(found.ok_or("a key lies outside of its tensor")?);
                    }
                }
            }
        }
        CaseTensor::new(dtype, &[self.blocks, self.block_size, heads * dim], bytes).map_err(|error| error.to_string())
    }
}

/// Batch entry (or block) and row of a token of sequence `b`.
fn place(original: &Sequences, b: usize, token: usize) -> Result<(usize, usize), String> {
    let first = original.rows(b).kv_first;
    let Some(pages) = &original.problem.pages else {
        return Ok((original.problem.key_value(b).batch, first + token));
    };
    let table = original.case().tensor(Parameter::BlockTable);
    let table = table.and_then(CaseTensor::to_i64).unwrap_or_default();
    let column = (token / pages.block_size) as i64;
    let entry = pages.table.offset + b as i64 * pages.row + column * pages.column;
    let block = usize::try_from(entry).ok().and_then(|at| table.get(at));
    let block = block.and_then(|&id| usize::try_from(id).ok());
    let block = block.ok_or("the block table is too short")?;
    Ok((block, token % pages.block_size))
}

/// The tensor with `size` entries on its last axis; new entries are filled with `byte`.
fn widened(tensor: &CaseTensor, size: usize, byte: u8) -> Result<CaseTensor, String> {
    let mut shape = tensor.shape().to_vec();
    let (Some(last), Some(element)) = (shape.last_mut(), tensor.dtype().size()) else {
        return Ok(tensor.clone());
    };
    let old = *last * element;
    *last = size.max(*last);
    let new = *last * element;
    let mut bytes = Vec::new();
    for row in tensor.bytes().chunks(old.max(1)) {
        bytes.extend_from_slice(row);
        bytes.resize(bytes.len() + new - old, byte);
    }
    CaseTensor::new(tensor.dtype(), &shape, bytes).map_err(|error| error.to_string())
}
