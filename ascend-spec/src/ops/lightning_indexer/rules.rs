//! The rules of LightningIndexer.

use super::{IndexerCall, IndexerProblem, Parameter, Version};
use crate::Cann::{V9_0, V9_2};
use crate::DType::{Bf16, Float, Float16, Int32};
use crate::allowed::{Allowed, Checked, Named, Outcome};
use crate::contract::first_lint;
use crate::ops::sparse_sequences::{SequenceTensors, SparseSequences, TokenLayout, sequence_rules, shaped};
use crate::rule::{lint, require, rules};
use crate::{DType, Rule, Soc, Target, TensorDesc, Violation};

sequence_rules! {
    "indexer", "LightningIndexer", layout of keys "layoutKey", on Ascend 950 since "9.1",
    columns "", multiples "", rows without keys "such rows choose none",
    in Scope::ALL.since(V8_5).since_on_950(V9_1);
    {
        QUERY = "indexer.query", API_ERROR, V1, "LightningIndexer API, query"
            in Scope::ALL.since(V9_0).since_on_950(V9_1),
            "query is given",
            "pass the queries";
        VALUES = "indexer.values", API_ERROR, V1, "LightningIndexer API, sparseValues"
            in Scope::ALL.since(V9_0).since_on_950(V9_1),
            "sparseValues is given with returnValues",
            "pass a tensor for the scores, or leave returnValues out";
        REQUIRED = "indexer.required", PARAM_NULLPTR, V1, "LightningIndexer documentation, return values",
            "query, key, weights, sparseIndices and in 8.5 sparseValues are given",
            "pass queries, keys, weights and both outputs";
        DTYPE = "indexer.dtype", PARAM_INVALID, V1, "LightningIndexer documentation, dtypes",
            "query is FLOAT16 or BF16, key and sparseValues have its dtype, weights too or from 9.0 on FLOAT, and "
            "lengths, blockTable and sparseIndices are INT32",
            "convert the named tensor to one of the allowed dtypes";
    }
    {
        COUNT = "indexer.count", TILING_ERROR, V1, "LightningIndexer tiling, sparseCount",
            "sparseCount is 1 to 2048 or, from 9.0 on, a multiple of 1024, from 9.2 on at most 8192",
            "choose 1 to 2048 keys, or a multiple of 1024 up to 8192 where the release takes more";
        VALUES_PAGED = "indexer.values_paged", TILING_ERROR, V1, "LightningIndexer tiling, returnValues",
            "scores are not returned for keys in a paged cache",
            "leave returnValues out, or gather the keys";
    }
    {
        HEAD_DIM = "indexer.head_dim", TILING_ERROR, V1, "LightningIndexer tiling, heads",
            "heads have 128 dimensions, and keys one head",
            "fill heads of fewer dimensions up to 128 with zeros; longer ones, and keys of several heads, have no "
            "operator: choose their keys on the host";
        HEADS = "indexer.heads", TILING_ERROR, V1, "LightningIndexer tiling, heads"
            in Scope::ALL.since(V9_0).since_on_950(V9_1),
            "there are 1 to 64 query heads, on Ascend 950 from 9.2 on 8, 16, 24, 32 or 64",
            "fill queries and weights up to such a number of heads with zeros, which count nothing; no call has more "
            "than 64";
        WEIGHTS_950 = "indexer.weights_950", TILING_ERROR, V1, "LightningIndexer tiling, weights"
            in Scope::ASCEND_950.since_on_950(V9_2),
            "on Ascend 950 weights have the dtype of query",
            "convert the weights";
        WEIGHTS = "indexer.weights", TILING_ERROR, V1, "LightningIndexer tiling, weights",
            "weights have the shape of query without its last axis",
            "give a weight for each head of each row";
        INDICES = "indexer.indices", TILING_ERROR, V1, "LightningIndexer tiling, sparseIndices",
            "sparseIndices is [B, S1, 1, sparseCount] or [T1, 1, sparseCount]",
            "give room for the keys of each row";
        VALUES_SHAPE = "indexer.values_shape", TILING_ERROR, V1, "LightningIndexer tiling, sparseValues"
            in Scope::ALL.since(V9_0).since_on_950(V9_1),
            "with returnValues sparseValues has the shape of sparseIndices",
            "give room for the scores of each row";
        EMPTY = "indexer.empty", TILING_ERROR, V1, "LightningIndexer tiling, shapes"
            in Scope::ASCEND_950.since_on_950(V9_2),
            "on Ascend 950 neither queries nor keys are empty",
            "leave the call out where there is nothing to choose";
        VALUES_ROOM = "indexer.values_room", Overrun("a score is written for each index, whatever room there is"), V1,
            "LightningIndexer tiling, sparseValues" in Scope::A2_A3.since(V8_5).until(V8_5),
            "with returnValues sparseValues has the shape of sparseIndices in 8.5 too, which does not look at it",
            "give room for the scores of each row";
        HEADS_UNCHECKED = "indexer.heads_unchecked", Overrun("buffers of the kernel are for 64 heads"), V1,
            "LightningIndexer documentation, query" in Scope::A2_A3.since(V8_5).until(V8_5),
            "there are at most 64 query heads in 8.5 too, which does not count them",
            "choose keys with fewer heads";
        COUNT_UNCHECKED = "indexer.count_unchecked", Overrun("buffers of the kernel are for 8192 keys"), V1,
            "LightningIndexer documentation, sparseCount"
            in Scope::ALL.since(V9_0).until(V9_1).since_on_950(V9_1).until_on_950(V9_1),
            "sparseCount is at most 8192 before 9.2 too",
            "choose fewer keys";
        PRODUCT_UNCHECKED = "indexer.product_unchecked",
            Overrun("9.1 checks calls on Ascend 950 as on Atlas A2, and its kernel is another"), V1,
            "LightningIndexer documentation, Ascend 950" in Scope::ASCEND_950.since_on_950(V9_1).until_on_950(V9_1),
            "on Ascend 950 there are 8, 16, 24, 32 or 64 query heads, and weights have the dtype of query, in 9.1 too",
            "use such heads and weights";
        NONE_CHOSEN = "indexer.none_chosen", Lint("nothing is written"), V1, "LightningIndexer tiling, sparseCount",
            "there is at least one row, and each chooses at least one key",
            "leave the call out where nothing is chosen";
    }
}

/// Dimensions of a head.
pub(crate) const DIM: i64 = 128;
/// Largest number of keys that every release chooses in any number.
pub(crate) const ANY_COUNT: i64 = 2048;
/// Largest number of keys that the documents allow.
const MOST_COUNT: i64 = 8192;
/// Largest number of query heads.
pub(crate) const MOST_HEADS: i64 = 64;
/// Numbers of query heads on Ascend 950.
pub(crate) const HEADS_950: [i64; 5] = [8, 16, 24, 32, 64];

impl IndexerCall<'_> {
    /// Checks the call against the contract of the operator on `target`, and resolves it. The contents of lengths and
    /// table are not checked.
    ///
    /// Allocates nothing unless it refuses.
    ///
    /// # Errors
    /// [`Violation`] by the first broken rule.
    pub fn check(&self, target: Target) -> Result<IndexerProblem, Violation> {
        PRODUCT.runs(Version::V1.info(), target)?;
        // The function of 8.5 asks for every tensor, used or not.
        let asks_for_all = target.cann < V9_0;
        let query = match asks_for_all {
            true => REQUIRED.requires(self.query, "query")?,
            false => QUERY.requires(self.query, "query")?,
        };
        let key = REQUIRED.requires(self.key, "key")?;
        let weights = REQUIRED.requires(self.weights, "weights")?;
        let indices = REQUIRED.requires(self.sparse_indices, "sparseIndices")?;
        if asks_for_all {
            REQUIRED.requires(self.sparse_values, "sparseValues")?;
        }
        if self.return_values {
            VALUES.requires(self.sparse_values, "sparseValues")?;
        }
        self.dtypes(query.dtype, &weights, target)?;
        FORMAT.formats(self)?;
        let layouts = SEQUENCES.layouts([self.layout_query, self.layout_key]);
        let values_room = self.sparse_values.map_or(0, |values| values.elements().unwrap_or(0));
        // A call whose outputs are all empty ends before the tiling looks at it.
        if indices.is_empty() && values_room == 0 {
            return Ok(IndexerProblem {
                sequences: SparseSequences::none(),
                heads: 0,
                count: 0,
                values: false,
                best_first: true,
                overruns: false,
            });
        }
        let [layout_query, layout_key] = layouts?;
        self.judge_values(layout_key, target)?;
        let sequences = SEQUENCES.resolve(
            &SequenceTensors {
                query: &query,
                key: &key,
                lengths: [self.actual_seq_lengths_query, self.actual_seq_lengths_key],
                names: ["actualSeqLengthsQuery", "actualSeqLengthsKey"],
                block_table: self.block_table,
                sparse_block_size: None,
            },
            [layout_query, layout_key],
            self.sparse_mode == 3,
        )?;
        self.heads(&query, &key, target)?;
        let (rows, head_axes) = query.shape.split_at(query.shape.rank() - 2);
        let heads = head_axes[0];
        WEIGHTS_950.takes_on(target, weights.dtype, query.dtype)?;
        shaped(&WEIGHTS, "weights", &weights, rows, &[heads])?;
        shaped(&INDICES, "sparseIndices", &indices, rows, &[1, self.sparse_count])?;
        if let Some(values) = self.sparse_values.filter(|_| self.return_values && !asks_for_all) {
            shaped(&VALUES_SHAPE, "sparseValues", &values, rows, &[1, self.sparse_count])?;
        }
        require!(
            for target => sequences.query.total() > 0 && sequences.key.total() > 0 && sequences.batch > 0,
            EMPTY,
            format_args!("query {} and key {}", query.shape, key.shape),
            "at least one row each",
        );
        Ok(IndexerProblem {
            sequences,
            heads: heads as usize,
            count: self.sparse_count as usize,
            values: self.return_values,
            best_first: target.soc != Soc::Ascend950,
            overruns: self.return_values && values_room < indices.elements().unwrap_or(0),
        })
    }

    /// The first lint that the call, which holds every rule, breaks, leaving out those in `allowed` (by id).
    ///
    /// # Errors
    /// The broken lint, with the same fields as a broken rule.
    pub fn lint(&self, target: Target, allowed: &[&str]) -> Result<(), Violation> {
        let (Some(query), Some(weights), Some(indices)) = (self.query, self.weights, self.sparse_indices) else {
            return Ok(());
        };
        let heads = match &query.shape[..] {
            [.., heads, _] => *heads,
            _ => 0,
        };
        let kernel_950 = HEADS_950.contains(&heads) && weights.dtype == query.dtype;
        let values = self.sparse_values.filter(|_| self.return_values);
        let count = self.sparse_count;
        first_lint(allowed, |report| {
            if indices.is_empty() {
                return report(NONE_CHOSEN.broken(indices.shape, "rows and keys"));
            }
            HEADS_UNCHECKED.takes_on(target, heads, ..=MOST_HEADS).report(report);
            if let Some(values) = values {
                VALUES_ROOM.takes_on(target, values.shape, indices.shape).report(report);
            }
            COUNT_UNCHECKED.takes_on(target, count, ..=MOST_COUNT).report(report);
            lint!(
                report,
                kernel_950 || !PRODUCT_UNCHECKED.scope.holds(target),
                PRODUCT_UNCHECKED,
                format_args!("{heads} heads and weights of {}", weights.dtype),
                format_args!("8, 16, 24, 32 or 64 heads and weights of {}", query.dtype),
            );
        })
    }

    fn dtypes(&self, own: DType, weights: &TensorDesc, target: Target) -> Checked {
        DTYPE.takes(Named("query", own), [Float16, Bf16])?;
        let of_weights: &[DType] = match target.cann < V9_0 {
            true => &[own],
            false => &[own, Float],
        };
        DTYPE.takes(Named("weights", weights.dtype), of_weights)?;
        DTYPE.dtypes(self, |parameter| {
            Some(match parameter {
                Parameter::Query | Parameter::Weights => return None,
                Parameter::Key | Parameter::SparseValues => own,
                _ => Int32,
            })
        })
    }

    fn judge_values(&self, layout_key: TokenLayout, target: Target) -> Checked {
        COUNT.takes(self.sparse_count, Counts(target))?;
        SEQUENCES.visibility(self.sparse_mode, [self.pre_tokens, self.next_tokens])?;
        VALUES_PAGED.forbids([("returnValues with PA_BSND", self.return_values && layout_key == TokenLayout::PaBsnd)])
    }

    fn heads(&self, query: &TensorDesc, key: &TensorDesc, target: Target) -> Checked {
        let last = |desc: &TensorDesc| match desc.shape[..] {
            [.., heads, dim] => (heads, dim),
            _ => (0, 0),
        };
        let ((heads, dim), (key_heads, key_dim)) = (last(query), last(key));
        HEAD_DIM.takes(Named("query", dim), DIM)?;
        HEAD_DIM.takes(Named("key", key_dim), DIM)?;
        HEAD_DIM.takes(Named("key heads", key_heads), 1)?;
        let verdict = match target.is_950() && target.cann >= V9_2 {
            true => HEADS.takes(heads, HEADS_950),
            false => HEADS.takes_on(target, heads, 1..=MOST_HEADS),
        };
        verdict.fix(|| heads_fix(&HEADS, heads))
    }
}

/// What mends a number of query heads that `rule` refuses: no zeros make too many of them fewer.
pub(crate) fn heads_fix(rule: &Rule, heads: i64) -> &'static str {
    match heads > MOST_HEADS {
        true => "choose the keys on the host: no call has more than 64 heads",
        false => rule.fix,
    }
}

/// The numbers of keys that a release chooses.
struct Counts(Target);

impl Allowed<i64> for Counts {
    fn admits(&self, count: &i64) -> bool {
        let Counts(target) = self;
        let multiple = target.cann >= V9_0 && count % 1024 == 0;
        (1..=ANY_COUNT).contains(count) || multiple && (target.cann < V9_2 || *count <= MOST_COUNT)
    }

    fn name(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "1 to {ANY_COUNT}")?;
        if self.0.cann >= V9_0 {
            f.write_str(", or a multiple of 1024")?;
        }
        if self.0.cann >= V9_2 {
            write!(f, " up to {MOST_COUNT}")?;
        }
        Ok(())
    }
}
