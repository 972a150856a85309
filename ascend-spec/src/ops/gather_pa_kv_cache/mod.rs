//! GatherPaKvCache: copies the keys and values of sequences from the blocks of a paged cache into rows one after the
//! other.
//!
//! Row `t` of sequence `b` is row `t % block_size` of the block that the table names in row `b`, column `first(b) + t
//! / block_size`. [`GatherCall`] checks shapes and attributes; the contents of table, lengths and offsets are checked
//! by [`GatherProblem::sources`].

mod problem;
pub mod rules;

pub use problem::{GatherProblem, Source};

use crate::Cann::V8_5;
use crate::contract::{CallContract, checked_for, contents_checked_for, described_by};
use crate::operator::{OperatorVersion, versions};
use crate::{Dims, TensorDesc};

declare_operator! {
    /// Source: aclnnGatherPaKvCache, parameter table.
    gather_pa_kv_cache_arguments, "GatherPaKvCache", #[derive(Copy)] GatherCall<'a>;
    1 { key_cache: tensor, KeyCache, "keyCache",
        "Cache of the keys: `[blocks, block size, N, D]`; with `PA_NZ` `[blocks, N * D / c, block size, c]`, \
         where `c` elements are 32 bytes." }
    1 { value_cache: tensor, ValueCache, "valueCache", "Cache of the values, as that of the keys." }
    1 { block_tables: tensor, BlockTables, "blockTables", "The blocks of each sequence, `[B, M]`." }
    1 { seq_lens: tensor, SeqLens, "seqLens",
        "Tokens of each sequence, `[B]`; or where each begins, and the end of the last, `[B + 1]`." }
    1 { key: inout, Key, "keyRef", "Keys of all sequences, `[tokens, N, D]`; with `PA_NZ` `[tokens, N * D]`." }
    1 { value: inout, Value, "valueRef", "Values of all sequences, as the keys." }
    1 { seq_offset: tensor, SeqOffset, "seqOffset",
        "Tokens before the first of each sequence, `[B]`: whole blocks of them are passed over." }
    1 { cache_mode: optional_text, CacheMode, "cacheMode",
        "Order of the caches: `Norm` (also null or empty) or `PA_NZ`." }
    1 { is_seq_lens_cumsum: flag = false, IsSeqLensCumsum, "isSeqLensCumsum",
        "Whether `seqLens` says where sequences begin." }
}

versions! {
    /// The version of GatherPaKvCache.
    pub enum Version {
        /// The only one.
        V1 = OperatorVersion::new(1, "aclnnGatherPaKvCache", "8.5")
            .exported_since(V8_5).on_a2_a3(V8_5).on_ascend950(V8_5),
    }
}

described_by! { GatherPaKvCache, rules::RULES }

impl CallContract for GatherPaKvCache {
    checked_for! { target }

    fn imply_outputs(arguments: &mut Self::Arguments, expected: &dyn Fn(&str) -> Option<Dims>) {
        let rows = |cache: Option<TensorDesc>, name: &str| {
            let desc = TensorDesc::packed(cache?.dtype, expected(name)?);
            desc.byte_range().map(|_| desc)
        };
        arguments.key = arguments.key.or_else(|| rows(arguments.key_cache, "key"));
        arguments.value = arguments.value.or_else(|| rows(arguments.value_cache, "value"));
    }

    contents_checked_for! { target, |_, problem, integers| {
        let parameters = [Parameter::BlockTables, Parameter::SeqLens, Parameter::SeqOffset];
        let [table, lengths, offsets] = parameters.map(integers);
        let mut wrong = None;
        problem.sources(&table, &lengths, &offsets, &mut |source| match source {
            Source::Row { .. } => {}
            other => wrong = wrong.take().or(Some(other)),
        });
        match wrong {
            None => Ok(()),
            Some(wrong) => Err(rules::BLOCK.broken(
                format_args!("{wrong:?}"),
                format_args!("{} blocks, {} rows of outputs", problem.blocks, problem.tokens),
            )),
        }
    } }
}
