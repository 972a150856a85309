//! The sequences of a call of sparse attention: their lengths and blocks on the device, known to the host.

use std::sync::Arc;

use ascend_spec::Rule;
use ascend_spec::ops::sparse_sequences::{TokenLayout, checked_contents, unusual_contents};

use crate::error::{Error, Result};
use crate::runtime::{Context, Stream};
use crate::tensor::{AnyTensor, Tensor};

/// The query rows and keys of each sequence and, for a paged cache, its blocks.
///
/// Operators of sparse attention read these numbers on the device, where nothing checks them. Made here, the host knows
/// them: plans refuse lengths and blocks that their tensors do not have. Cloning shares the memory.
///
/// | made by | queries | keys |
/// |---|---|---|
/// | [`packed`](Self::packed) | `[T1, N, D]` | `[T2, 1, D]` |
/// | [`padded`](Self::padded) | `[B, S1, N, D]` | `[B, S2, 1, D]` |
/// | either, then [`paged`](Self::paged) | as before | `[blocks, block size, 1, D]` |
#[derive(Clone, Debug)]
pub struct SparseSequences {
    layouts: [TokenLayout; 2],
    lengths: Arc<[Vec<usize>; 2]>,
    /// What the tensors hold.
    numbers: Arc<[Vec<i64>; 3]>,
    tensors: [Tensor<i32>; 2],
    block_table: Option<Tensor<i32>>,
}

impl SparseSequences {
    /// Sequences with these query rows and keys, each side packed one sequence after the other.
    ///
    /// # Errors
    /// [`ARGUMENT_VALUE`](crate::rules::ARGUMENT_VALUE) for no sequence, another number of lengths of keys than of
    /// queries, and numbers beyond INT32; otherwise as for [`Stream::upload`].
    pub fn packed(stream: &Stream, query_lengths: &[usize], key_lengths: &[usize]) -> Result<Self> {
        Self::new(stream, [TokenLayout::Tnd; 2], [query_lengths, key_lengths])
    }

    /// Sequences with these query rows and keys, which have as much room each.
    ///
    /// # Errors
    /// As for [`SparseSequences::packed`].
    pub fn padded(stream: &Stream, query_lengths: &[usize], key_lengths: &[usize]) -> Result<Self> {
        Self::new(stream, [TokenLayout::Bsnd; 2], [query_lengths, key_lengths])
    }

    /// The sequences with their keys in a paged cache: the blocks of each, `rows`.
    ///
    /// # Errors
    /// [`ARGUMENT_VALUE`](crate::rules::ARGUMENT_VALUE) for another number of rows than of sequences, a table without
    /// columns, and blocks beyond INT32; otherwise as for [`Stream::upload`].
    pub fn paged(&self, stream: &Stream, rows: &[impl AsRef<[usize]>]) -> Result<Self> {
        let [query_lengths, key_lengths] = &*self.lengths;
        let columns = rows.iter().map(|row| row.as_ref().len()).max().unwrap_or(0);
        let sequences = query_lengths.len();
        if rows.len() != sequences || columns == 0 {
            let given = format_args!("{} rows, the longest of {columns} blocks", rows.len());
            let allowed = format_args!("a row of blocks for each of {sequences} sequences");
            return Err(Error::invalid("rows", given, allowed).fix("make the rows and the lengths from the same batch"));
        }
        let layouts = [self.layouts[0], TokenLayout::PaBsnd];
        let mut paged = Self::new(stream, layouts, [query_lengths, key_lengths])?;
        // An entry that no key reaches is no block.
        let mut table = Vec::new();
        if table.try_reserve_exact(rows.len().saturating_mul(columns)).is_err() {
            let given = format_args!("a table [{}, {columns}]", rows.len());
            return Err(Error::invalid("rows", given, "a table that fits in the host's memory")
                .fix("give sequences with long rows by themselves"));
        }
        for row in rows {
            let row = row.as_ref();
            for column in 0..columns {
                table.push(match row.get(column) {
                    Some(&block) => number("rows", block)?,
                    None => -1,
                });
            }
        }
        let uploaded = stream.upload(&table, [rows.len(), columns])?;
        uploaded.freeze();
        let [queries, keys, _] = &*paged.numbers;
        let table = table.into_iter().map(i64::from).collect();
        paged.numbers = Arc::new([queries.clone(), keys.clone(), table]);
        paged.block_table = Some(uploaded);
        Ok(paged)
    }

    fn new(stream: &Stream, layouts: [TokenLayout; 2], lengths: [&[usize]; 2]) -> Result<Self> {
        let [queries, keys] = lengths.map(<[usize]>::len);
        if queries == 0 || queries != keys {
            let given = format_args!("{queries} of queries and {keys} of keys");
            return Err(Error::invalid("lengths", given, "both for each of at least one sequence")
                .fix("make both from the same batch"));
        }
        let given = |layout: TokenLayout, lengths: &[usize]| {
            let mut end = 0usize;
            let numbers = lengths.iter().map(|&length| {
                end = end.saturating_add(length);
                number("lengths", if layout == TokenLayout::Tnd { end } else { length })
            });
            numbers.collect::<Result<Vec<i32>>>()
        };
        let queries = given(layouts[0], lengths[0])?;
        let keys = given(layouts[1], lengths[1])?;
        let upload = |numbers: &[i32]| {
            let tensor = stream.upload(numbers, [numbers.len()])?;
            tensor.freeze();
            Ok::<_, Error>(tensor)
        };
        let wide = |numbers: &[i32]| numbers.iter().copied().map(i64::from).collect();
        Ok(Self {
            layouts,
            lengths: Arc::new(lengths.map(<[usize]>::to_vec)),
            numbers: Arc::new([wide(&queries), wide(&keys), Vec::new()]),
            tensors: [upload(&queries)?, upload(&keys)?],
            block_table: None,
        })
    }

    /// The numbers of query rows on the device, `[B]`; packed, the end of each sequence. Nothing can be written to
    /// them.
    pub fn query_lengths(&self) -> &Tensor<i32> {
        &self.tensors[0]
    }

    /// The numbers of keys on the device, `[B]`; packed, the end of each sequence. Nothing can be written to them.
    pub fn key_lengths(&self) -> &Tensor<i32> {
        &self.tensors[1]
    }

    /// The block table on the device, `[B, columns]`, of keys in a paged cache. Nothing can be written to it.
    pub fn block_table(&self) -> Option<&Tensor<i32>> {
        self.block_table.as_ref()
    }

    /// The query rows and the keys of each sequence, as the arguments of operators that read them on the host.
    pub(crate) fn lengths(&self) -> [Vec<i64>; 2] {
        let wide =
            |lengths: &Vec<usize>| lengths.iter().map(|&length| i64::try_from(length).unwrap_or(i64::MAX)).collect();
        self.lengths.each_ref().map(wide)
    }

    /// What the tensors hold: query rows and keys, as ends where they are packed, and the block table.
    pub(crate) fn numbers(&self) -> &[Vec<i64>; 3] {
        &self.numbers
    }

    /// The layouts of queries and keys, as CANN names them.
    pub(crate) fn layouts(&self) -> [&'static str; 2] {
        self.layouts.map(TokenLayout::name)
    }

    /// Refuses tensors that are not on this device.
    pub(crate) fn on(&self, context: &Arc<Context>) -> Result<()> {
        let mut all = self.tensors.iter().chain(&self.block_table);
        all.try_for_each(|tensor| tensor.on("sequences", context))
    }

    /// The tensors as the arguments of a call: lengths of queries and of keys, and the block table, if there is one.
    pub(crate) fn each<P>(&self, parameters: [P; 3]) -> impl Iterator<Item = (P, &AnyTensor)> {
        let tensors = self.tensors.iter().chain(&self.block_table);
        parameters.into_iter().zip(tensors.map(|tensor| &**tensor))
    }

    /// Refuses by the rule a call whose tensors have no room for what the numbers say.
    pub(crate) fn within(
        &self,
        sequences: &ascend_spec::ops::sparse_sequences::SparseSequences,
        rule: &'static Rule,
    ) -> Result<()> {
        Ok(checked_contents(sequences, &self.numbers, rule)?)
    }

    /// Refuses by the first rule a call whose tensors have no room for what the numbers say, and by lints that are not
    /// allowed query rows of no sequence, and rows without keys.
    pub(crate) fn check(
        &self,
        sequences: &ascend_spec::ops::sparse_sequences::SparseSequences,
        [within, left_out, without_keys]: [&'static Rule; 3],
        allowed: &[&str],
    ) -> Result<()> {
        self.within(sequences, within)?;
        let unusual = unusual_contents(sequences, &self.numbers, [left_out, without_keys]);
        let mut refused = unusual.into_iter().flatten();
        match refused.find(|lint| !allowed.contains(&lint.rule.id)) {
            Some(lint) => Err(lint.into()),
            None => Ok(()),
        }
    }
}

/// What a call writes, as its inputs imply it; `too_large` is the refusal of outputs that memory cannot hold.
pub(crate) fn implied<D>(outputs: Option<D>, query: &AnyTensor, too_large: impl FnOnce() -> Error) -> Result<D> {
    let shape = query.desc().shape;
    outputs.ok_or_else(|| match shape.rank() {
        0..3 => Error::invalid("query", shape, "[B, S1, N1, D] or [T1, N1, D]").fix("give the queries these axes"),
        _ => too_large(),
    })
}

/// The refusal of a number of keys for which each row would have more indices than memory holds.
pub(crate) fn too_many_keys(count: i64) -> Error {
    Error::invalid("count", count, "rows that memory can hold").fix("choose fewer keys")
}

/// The refusal of queries of which attention is larger than memory, since many rows are the same bytes.
pub(crate) fn too_many_rows(query: &AnyTensor) -> Error {
    Error::invalid("query", query.desc(), "rows whose attention memory can hold").fix("attend with fewer rows")
}

/// A number that INT32 holds.
pub(crate) fn number(name: &'static str, value: usize) -> Result<i32> {
    i32::try_from(value).map_err(|_| {
        Error::invalid(name, value, format_args!("0 to {}", i32::MAX))
            .fix("use the numbers that the cache gave its blocks, and lengths that INT32 counts")
    })
}
