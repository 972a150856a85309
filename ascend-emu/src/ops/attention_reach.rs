//! The attention calls that the kernels can compute, whatever the contract takes.

use crate::kernel;
use ascend_spec::Violation;
use ascend_spec::attention_problem::AttentionProblem;
use ascend_spec::ops::fused_infer_attention_score::CheckedCall;

/// Largest number of query blocks, and of cached key blocks, that a launch keeps a list of.
const MOST_BLOCKS: usize = 1 << 26;

/// Checks that the kernel can compute a call. Tensors of stride 0 are small however many rows they have, so memory
/// alone does not limit their rows.
pub(super) fn within_reach(problem: &AttentionProblem<'_>) -> Result<(), Violation> {
    let unsupported = |feature| Err(Violation::unsupported(feature));
    if problem.batch > MOST_BLOCKS {
        // An empty query may have any number of sequences.
        return unsupported("more than 67108864 sequences");
    }
    let longest = (0..problem.batch).map(|b| problem.kv_len(b)).max();
    let longest = longest.unwrap_or(0);
    if problem.query_rows > CheckedCall::MOST_ROWS || longest > CheckedCall::MOST_ROWS {
        return unsupported("a sequence of more than 20971520 query rows or keys");
    }
    let queries = problem
        .batch
        .saturating_mul(problem.heads)
        .saturating_mul(problem.query_rows.div_ceil(kernel::BLOCK_QUERIES));
    let keys = problem.pages.map_or(0, |pages| {
        let blocks = longest.div_ceil(pages.block_size.max(1));
        problem.batch.saturating_mul(blocks)
    });
    if queries.max(keys) > MOST_BLOCKS {
        return unsupported("more than 67108864 blocks of queries or of cached keys");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::within_reach;
    use ascend_spec::ops::fused_infer_attention_score::{FiaCall, Version};
    use ascend_spec::{DType, Dims, Soc, Target, TensorDesc};

    /// A tensor of one element in memory, whose shape claims more.
    fn stretched(dtype: DType, shape: &[i64]) -> TensorDesc {
        let shape = Dims::new(shape).unwrap();
        let strides = Dims::new(&vec![0; shape.rank()]).unwrap();
        TensorDesc {
            strides,
            ..TensorDesc::packed(dtype, shape)
        }
    }

    fn reached(call: &FiaCall<'_>) -> bool {
        let checked = call
            .check(Version::V1, Target::snapshot(Soc::AtlasA2))
            .unwrap();
        within_reach(&checked.problem).is_ok()
    }

    #[test]
    fn tiny_tensors_that_claim_to_be_large_are_refused() {
        let half = |shape: &[i64]| stretched(DType::Float16, shape);
        let dense = |batch, heads, rows, keys: i64| {
            let key = [half(&[batch, heads, keys, 16])];
            let call = FiaCall {
                query: Some(half(&[batch, heads, rows, 16])),
                key: &key,
                value: &key,
                num_heads: heads,
                attention_out: Some(half(&[batch, heads, rows, 16])),
                ..FiaCall::new("BNSD")
            };
            reached(&call)
        };
        assert!(dense(2, 256, 1000, 1000));
        assert!(dense(1, 8, 20_971_520, 20_971_520));
        assert!(!dense(1, 1, 1_000_000_000_000, 16));
        assert!(!dense(1, 1, 16, 1_000_000_000_000));
        assert!(!dense(60_000, 256, 20_000_000, 16));
        let cache = [half(&[4, 16, 16])];
        let lengths = vec![16_000_000; 65_536];
        let paged = FiaCall {
            query: Some(half(&[65_536, 1, 1, 16])),
            key: &cache,
            value: &cache,
            num_heads: 1,
            block_table: Some(stretched(DType::Int32, &[65_536, 1_000_000])),
            block_size: 16,
            actual_seq_lengths_kv: Some(&lengths),
            attention_out: Some(half(&[65_536, 1, 1, 16])),
            ..FiaCall::new("BNSD")
        };
        assert!(!reached(&paged));
    }
}
