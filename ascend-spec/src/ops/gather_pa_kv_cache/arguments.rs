//! The arguments of GatherPaKvCache, in its own order.

/// Passes the tokens `$with` and then the table of arguments to the macro `$then`; [`operator`](crate::operator)
/// describes the table's form.
///
/// Source: aclnnGatherPaKvCache, parameter table.
#[doc(hidden)]
#[macro_export]
#[rustfmt::skip]
macro_rules! gather_pa_kv_cache_arguments {
    ($then:ident $with:tt) => {
        $then! { $with
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
    };
}

gather_pa_kv_cache_arguments! { declare_arguments { "GatherPaKvCache", #[derive(Copy)] GatherCall<'a> } }
