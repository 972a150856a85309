//! The arguments of ScatterPaKvCache, in its own order.

/// Passes the tokens `$with` and then the table of arguments to the macro `$then`; [`operator`](crate::operator)
/// describes the table's form.
///
/// Source: aclnnScatterPaKvCache, parameter table.
#[doc(hidden)]
#[macro_export]
#[rustfmt::skip]
macro_rules! scatter_pa_kv_cache_arguments {
    ($then:ident $with:tt) => {
        $then! { $with
            1 { key: tensor, Key, "key", "New keys, `[tokens, N, D]`." }
            1 { key_cache: inout, KeyCache, "keyCacheRef",
                "Cache of the keys, written in place: `[blocks, block size, N, D]`; with `PA_NZ` `[blocks, N * D / c, \
                 block size, c]` or `[blocks, N, D / c, block size, c]`, where `c` elements are 32 bytes." }
            1 { slot_mapping: tensor, SlotMapping, "slotMapping", "The slot of each token." }
            1 { value: tensor, Value, "value", "New values, `[tokens, N, Dv]`; none to write keys alone." }
            1 { value_cache: inout, ValueCache, "valueCacheRef", "Cache of the values, as that of the keys." }
            1 { compress_lens: tensor, CompressLens, "compressLens", "For the compressed modes." }
            1 { compress_seq_offset: tensor, CompressSeqOffset, "compressSeqOffset", "For the compressed modes." }
            1 { seq_lens: tensor, SeqLens, "seqLens", "For the compressed modes." }
            1 { cache_mode: optional_text, CacheMode, "cacheMode",
                "Order of the caches: `Norm` (also null) or `PA_NZ`." }
            1 { scatter_mode: optional_text, ScatterMode, "scatterMode",
                "How tokens are chosen: `None` (also null), `Alibi`, `Rope`, `Omni` or `Nct`." }
            1 { strides: int_list, Strides, "strides", "Steps of keys and values; null means 1 and 1." }
            1 { offsets: int_list, Offsets, "offsets", "First elements of keys and values; null means 0 and 0." }
        }
    };
}

scatter_pa_kv_cache_arguments! { declare_arguments { "ScatterPaKvCache", #[derive(Copy)] ScatterCall<'a> } }
