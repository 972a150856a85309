//! What the operators share that attend to a paged cache: the rules of shapes, lengths and heads.

use super::with_heads;
use crate::allowed::{Allowed, Axis, Checked, MultiplesOf, Named, Noted, Rank, Report, Shapes};
use crate::attention_problem::lint_scale;
use crate::ops::sparse_sequences::{Room, SparseSequences, TokenLayout, shaped};
use crate::{Dims, Rule, TensorDesc, Violation};

/// Declares the rules of an operator that attends to a paged cache, in the form of [`rules!`](crate::rule::rules):
/// those that each such operator has and, after them, its own. Also declares the table `ATTENTION` of the rules that
/// [`NsaAttentionRules`] asks. The literals say what differs.
macro_rules! nsa_attention_rules {
    (
        $id:literal, $operator:literal, required $required:ident $tensors:literal $pass:literal,
        layouts $layouts:literal, ranks $rank:ident $cache:literal, batch $batch_status:ident $batch:literal,
        heads $heads:literal, elements $head_dim:literal $fill:literal, pages $pages:literal,
        blocks $blocks:literal;
        $($own:tt)*
    ) => {
        $crate::rule::rules! {
            in Scope::A2_A3.since(V8_5);
            PRODUCT = $id ".product", FIND_KERNEL_ERROR, V1, $operator " documentation, products" in Scope::ALL,
                "the product has the operator in the release",
                "run on Atlas A2 or Atlas A3 with CANN 8.5 or newer";
            REQUIRED = $id ".required", $required, V1, $operator " documentation, return values",
                $tensors " are given",
                "pass " $pass;
            DTYPE = $id ".dtype", PARAM_INVALID, V1, $operator " documentation, dtypes",
                "query is FLOAT16 or BF16, key, value and output have its dtype, and blockTable and the blocks that "
                "are selected are INT32",
                "convert the named tensor to one of the allowed dtypes";
            format of $id, PARAM_INVALID, $operator " documentation, parameters";
            LAYOUT = $id ".layout", PARAM_INVALID, V1, $operator " documentation, layout",
                "layout is " $layouts,
                "spell the layout as CANN does";
            RANK = $id ".rank", $rank, V1, $operator " documentation, shapes",
                "query has the axes of its layout, key and value are " $cache ", and blockTable is [B, columns]",
                "describe the tensor with as many axes";
            BATCH = $id ".batch", $batch_status, V1, $operator " documentation, batch",
                "query, blockTable and lengths have the same number of sequences, " $batch,
                "make all of them from the same batch, and divide a larger one over calls";
            ROWS = $id ".rows", INNER_NULLPTR, V1, $operator " tiling, actualQSeqLen",
                "each sequence has 1 to 4 query rows, and those of TND are together the rows of query",
                "give the rows of each sequence, not where it ends, and at most 4 of a sequence in a call";
            HEADS = $id ".heads", INNER_NULLPTR, V1, $operator " tiling, heads",
                "query has numHeads heads, key and value numKeyValueHeads, " $heads,
                "pass the numbers of heads that the tensors have, or attend with fewer heads at a time";
            HEAD_DIM = $id ".head_dim", INNER_NULLPTR, V1, $operator " tiling, heads",
                "heads of queries and keys have " $head_dim,
                $fill;
            PAGES = $id ".pages", INNER_NULLPTR, V1, $operator " tiling, pageBlockSize",
                "the cache has blocks of pageBlockSize tokens, " $pages ", as many for keys as for values",
                "make the cache of such blocks";
            SELECTED = $id ".selected", INNER_NULLPTR, V1, $operator " tiling, shapes",
                $blocks " has selectBlockCount blocks, at least one, for each query row and key head",
                "describe it as the rows of query, with axes of the key heads and the blocks";
            OUT = $id ".out", INNER_NULLPTR, V1, $operator " tiling, output",
                "output has the shape of query with the elements of a value",
                "give room for the attention of each row";
            TABLE_ROOM = $id ".table_room", Overrun("blocks behind the row of the table are read"), V1,
                $operator " kernel, blockTable",
                "lengths are at least 0, and the row of each sequence in blockTable has room for its tokens",
                "give the table as many columns as the longest sequence has blocks";
            MASK_UNREAD = $id ".mask_unread", Lint("the mask is not looked at here"), V1,
                $operator " documentation, masks",
                "no mask is given, and sparseMode is 0: what rows see follows from lengths",
                "leave masks out, and pass 0 as sparseMode";
            ROWS_LEFT_OUT = $id ".rows_left_out", Lint("CANN does not say what is written for such rows"), V1,
                $operator " documentation, actualQSeqLen",
                "query rows all belong to a sequence",
                "give a query of as many rows as each sequence has";
            scale of $id, $operator, "scores", "usually one over the root of the head dimension", "the head dimension",
                "the head dimension: with 0 all tokens weigh alike";
            CONTENTS = $id ".contents", Overrun("tokens of other memory are read"), V1, $operator " kernel, blockTable",
                "blockTable has a block of the cache for each token",
                "take lengths and table of one batch and one cache";
            $($own)*
        }

        /// The rules of shapes, lengths and heads.
        const ATTENTION: $crate::ops::native_sparse::NsaAttentionRules =
            $crate::ops::native_sparse::NsaAttentionRules {
                layout: &LAYOUT,
                rank: &RANK,
                batch: &BATCH,
                rows: &ROWS,
                heads: &HEADS,
                head_dim: &HEAD_DIM,
                pages: &PAGES,
                selected: &SELECTED,
                out: &OUT,
                table_room: &TABLE_ROOM,
                rows_left_out: &ROWS_LEFT_OUT,
                scale: [&SCALE, &SCALE_ZERO, &SCALE_INVERSE],
            };
    };
}

pub(crate) use nsa_attention_rules;

/// Most query rows of a sequence.
const MOST_ROWS: i64 = 4;

/// The rules of shapes, lengths and heads.
pub(crate) struct NsaAttentionRules {
    pub(crate) layout: &'static Rule,
    pub(crate) rank: &'static Rule,
    pub(crate) batch: &'static Rule,
    pub(crate) rows: &'static Rule,
    pub(crate) heads: &'static Rule,
    pub(crate) head_dim: &'static Rule,
    pub(crate) pages: &'static Rule,
    pub(crate) selected: &'static Rule,
    pub(crate) out: &'static Rule,
    pub(crate) table_room: &'static Rule,
    pub(crate) rows_left_out: &'static Rule,
    pub(crate) scale: [&'static Rule; 3],
}

/// The tensors and numbers by which an operator attends to a paged cache.
pub(crate) struct NsaTensors<'a> {
    pub(crate) layout: &'a str,
    pub(crate) query: TensorDesc,
    pub(crate) key: TensorDesc,
    pub(crate) value: TensorDesc,
    pub(crate) block_table: TensorDesc,
    /// The blocks that are selected, with the argument's name.
    pub(crate) selected: (&'static str, TensorDesc),
    pub(crate) out: TensorDesc,
    pub(crate) query_lengths: Option<&'a [i64]>,
    pub(crate) key_lengths: &'a [i64],
    /// `numHeads` and `numKeyValueHeads`.
    pub(crate) heads: [i64; 2],
    pub(crate) page: i64,
    pub(crate) select_count: i64,
}

/// A call that attends to a paged cache and holds the rules of shapes, lengths and heads.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct NsaAttention {
    /// The sequences, whose keys are the tokens of the cache.
    pub sequences: SparseSequences,
    /// Number of query heads.
    pub heads: usize,
    /// Number of key heads.
    pub kv_heads: usize,
    /// Elements of a value.
    pub value_dim: usize,
    /// Blocks that are selected for each row and key head.
    pub selected: usize,
    /// Factor of the scores.
    pub scale: f64,
}

impl NsaAttention {
    /// A call whose outputs are empty.
    pub(crate) const IDLE: Self = NsaAttention {
        sequences: SparseSequences::none(),
        heads: 0,
        kv_heads: 0,
        value_dim: 0,
        selected: 0,
        scale: 0.0,
    };

    /// Whether nothing is written.
    pub fn is_idle(&self) -> bool {
        self.sequences.query.total() == 0
    }

    /// Query heads that share a key head.
    pub fn group(&self) -> usize {
        self.heads / self.kv_heads.max(1)
    }

    /// A query, or an output, with an axis of heads.
    pub fn query(&self, desc: &TensorDesc) -> TensorDesc {
        split(desc, self.sequences.query.layout, self.heads)
    }

    /// Keys, or values, of the cache with an axis of heads.
    pub fn cache(&self, desc: &TensorDesc) -> TensorDesc {
        split(desc, TokenLayout::PaBsnd, self.kv_heads)
    }

    /// Lengths of queries and of keys and the block table, as the sequences read them: packed rows have ends.
    pub fn numbers(&self, query_lengths: Option<&[i64]>, key_lengths: &[i64], table: Vec<i64>) -> [Vec<i64>; 3] {
        let queries = match (self.sequences.query.layout, query_lengths) {
            (TokenLayout::Tnd, None) => (1..).take(self.sequences.batch).collect(),
            (TokenLayout::Tnd, Some(lengths)) => {
                let ends = lengths.iter().scan(0i64, |end, length| {
                    *end = end.saturating_add(*length);
                    Some(*end)
                });
                ends.collect()
            }
            (_, lengths) => lengths.unwrap_or_default().to_vec(),
        };
        [queries, key_lengths.to_vec(), table]
    }
}

/// A tensor of a layout, with an axis of heads where it has none.
fn split(desc: &TensorDesc, layout: TokenLayout, heads: usize) -> TensorDesc {
    match desc.shape.rank() < layout.rank() {
        true => with_heads(desc, heads),
        false => *desc,
    }
}

impl NsaAttentionRules {
    /// Checks axes, lengths, heads and the cache, and resolves the call. `layouts` are the names that the operator
    /// takes, `caches` the numbers of axes of keys and values, `pages` the sizes of blocks.
    pub(crate) fn resolve(
        &self,
        tensors: &NsaTensors<'_>,
        layouts: &[&str],
        caches: &[usize],
        pages: impl Allowed<i64>,
        batches: impl Allowed<i64>,
    ) -> Result<NsaAttention, Violation> {
        let NsaTensors { query, key, value, block_table, .. } = tensors;
        self.layout.takes(tensors.layout, layouts)?;
        let query_axes = if tensors.layout == "BSND" { 4 } else { 3 };
        self.rank.takes(Named("query", query.shape), Rank(query_axes))?;
        for (name, cache) in [("key", key), ("value", value)] {
            self.rank.takes(Named(format_args!("axes of {name}:"), cache.shape.rank()), caches)?;
        }
        self.rank.takes(Named("blockTable", block_table.shape), Rank(2))?;
        let batch = block_table.shape[0];
        self.batch.takes(Noted(batch, "sequences"), batches)?;
        let query_room = self.rows(tensors, batch)?;
        let [heads, kv_heads] = self.heads(tensors)?;
        self.pages.takes(Named("pageBlockSize", tensors.page), pages)?;
        let axes = [key.shape[0], tensors.page];
        for (name, cache) in [("key", key), ("value", value)] {
            let blocks = [Axis::Of(axes[0]), Axis::Of(axes[1]), Axis::Any, Axis::Any];
            self.pages.takes(Named(name, cache.shape), Shapes(&[&blocks[..cache.shape.rank()]]))?;
        }
        self.pages.takes(Named("blocks", axes[0]), 1..)?;
        let count = |size: i64| usize::try_from(size).unwrap_or(0);
        let value_dim = count(value.shape.last().copied().unwrap_or(0));
        let attention = NsaAttention {
            sequences: SparseSequences {
                batch: count(batch),
                query: query_room,
                key: Room { layout: TokenLayout::PaBsnd, outer: count(axes[0]), rows: count(axes[1]) },
                columns: count(block_table.shape[1]),
                causal: true,
            },
            heads: count(heads),
            kv_heads: count(kv_heads),
            value_dim: if value.shape.rank() == 3 { value_dim / count(kv_heads).max(1) } else { value_dim },
            selected: count(tensors.select_count),
            scale: 0.0,
        };
        self.outputs(tensors, &attention)?;
        Ok(attention)
    }

    /// Checks that queries and values have heads of allowed elements, and keys as many as queries.
    pub(crate) fn head_dims(
        &self,
        tensors: &NsaTensors<'_>,
        attention: &NsaAttention,
        of_query: impl Allowed<i64>,
        of_value: impl Allowed<i64>,
    ) -> Checked {
        let last = |desc: TensorDesc| desc.shape.last().copied().unwrap_or(0);
        let dim = last(attention.query(&tensors.query));
        self.head_dim.takes(Named("query", dim), of_query)?;
        self.head_dim.takes(Named("key", last(attention.cache(&tensors.key))), dim)?;
        self.head_dim.takes(Named("value", last(attention.cache(&tensors.value))), of_value)
    }

    /// Reports lengths that the table has no room for, rows of no sequence, and scales that are usually mistakes.
    pub(crate) fn lint(&self, tensors: &NsaTensors<'_>, attention: &NsaAttention, scale: f64, report: Report<'_>) {
        let SparseSequences { columns, key, query, .. } = attention.sequences;
        let room = i64::try_from(columns.saturating_mul(key.rows)).unwrap_or(i64::MAX);
        for (sequence, &length) in tensors.key_lengths.iter().enumerate() {
            let given = Named(format_args!("tokens of sequence {sequence}:"), length);
            if let Err(violation) = self.table_room.takes(given, 0..=room) {
                report(violation);
                break;
            }
        }
        let short = tensors.query_lengths.and_then(|lengths| {
            let rows = i64::try_from(query.rows).unwrap_or(i64::MAX);
            lengths.iter().find(|&&length| query.layout != TokenLayout::Tnd && length < rows)
        });
        if let Some(length) = short {
            report(self.rows_left_out.broken(format_args!("a sequence with {length} rows"), query.rows));
        }
        let dim = attention.query(&tensors.query).shape.last().map_or(0, |&dim| dim.max(0) as usize);
        lint_scale(scale, [dim, 0], self.scale, report);
    }

    /// Checks the query rows of each sequence, and returns their room.
    fn rows(&self, tensors: &NsaTensors<'_>, batch: i64) -> Result<Room, Violation> {
        let shape = &tensors.query.shape;
        let packed = tensors.layout == "TND";
        let counted = |lengths: &[i64]| i64::try_from(lengths.len()).unwrap_or(i64::MAX);
        self.batch.takes(Noted(counted(tensors.key_lengths), "lengths of keys"), batch)?;
        if let Some(lengths) = tensors.query_lengths {
            self.batch.takes(Noted(counted(lengths), "lengths of queries"), batch)?;
        }
        let most = if packed { MOST_ROWS } else { shape[1].min(MOST_ROWS) };
        for &length in tensors.query_lengths.unwrap_or_default() {
            self.rows.takes(Noted(length, "rows of a sequence"), 1..=most)?;
        }
        let size = |axis: usize| usize::try_from(shape[axis]).unwrap_or(0);
        if packed {
            // No sum overflows, as no length is larger than 4.
            let rows = tensors.query_lengths.map_or(batch, |lengths| lengths.iter().sum());
            self.rows.takes(Named("rows of query:", shape[0]), rows)?;
            return Ok(Room { layout: TokenLayout::Tnd, outer: 1, rows: size(0) });
        }
        self.batch.takes(Named("query", shape[0]), batch)?;
        self.rows.takes(Named("rows of query:", shape[1]), 1..=MOST_ROWS)?;
        Ok(Room { layout: TokenLayout::Bsnd, outer: size(0), rows: size(1) })
    }

    /// Checks the heads of query, key and value, and returns the numbers of query and of key heads.
    fn heads(&self, tensors: &NsaTensors<'_>) -> Result<[i64; 2], Violation> {
        let [heads, kv_heads] = tensors.heads;
        self.heads.takes(Named("numKeyValueHeads", kv_heads), 1..)?;
        self.heads.takes(Named("numHeads", heads), 1..)?;
        self.heads.takes(Named("numHeads", heads), MultiplesOf(kv_heads))?;
        let check = |name: &str, desc: &TensorDesc, axes: usize, heads: i64| match desc.shape.rank() < axes {
            true => {
                let elements = desc.shape.last().copied().unwrap_or(0);
                self.heads.takes(Named(format_args!("elements of {name}:"), elements), MultiplesOf(heads))
            }
            false => self.heads.takes(Named(name, desc.shape[desc.shape.rank() - 2]), heads),
        };
        check("query", &tensors.query, if tensors.layout == "TND" { 3 } else { 4 }, heads)?;
        check("key", &tensors.key, 4, kv_heads)?;
        check("value", &tensors.value, 4, kv_heads)?;
        Ok([heads, kv_heads])
    }

    /// Checks the shapes of the blocks that are selected and of the output.
    fn outputs(&self, tensors: &NsaTensors<'_>, attention: &NsaAttention) -> Checked {
        let packed = attention.sequences.query.layout == TokenLayout::Tnd;
        let rows = &tensors.query.shape[..if packed { 1 } else { 2 }];
        let (name, selected) = &tensors.selected;
        self.selected.takes(Named("selectBlockCount", tensors.select_count), 1..)?;
        shaped(self.selected, name, selected, rows, &[tensors.heads[1], tensors.select_count])?;
        self.out.takes(tensors.out.shape, out_shape(&tensors.query, tensors.layout, tensors.heads[0], attention))
    }
}

/// Shape of the output for a query.
fn out_shape(query: &TensorDesc, layout: &str, heads: i64, attention: &NsaAttention) -> Dims {
    let dim = i64::try_from(attention.value_dim).unwrap_or(i64::MAX);
    let last = if layout == "BSH" { heads.saturating_mul(dim) } else { dim };
    query.shape.with(query.shape.rank().saturating_sub(1), last)
}
