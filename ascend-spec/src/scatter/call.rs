//! A pure description of one call of ScatterPaKvCache.

use crate::TensorDesc;

/// Every argument of one call, without data and without addresses.
///
/// The fields are the operator's arguments in snake case, without `Ref` and `Optional`; `None` is a null pointer. The
/// values are what a caller wrote, right or wrong: [`ScatterCall::check`] tells.
///
/// Source: aclnnScatterPaKvCache, parameter table.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct ScatterCall<'a> {
    /// New keys, `[tokens, N, D]`.
    pub key: Option<TensorDesc>,
    /// Cache of the keys, written in place: `[blocks, block size, N, D]`; with `PA_NZ` `[blocks, N * D / c, block size, c]`
    /// or `[blocks, N, D / c, block size, c]`, where `c` elements are 32 bytes.
    pub key_cache: Option<TensorDesc>,
    /// The slot of each token.
    pub slot_mapping: Option<TensorDesc>,
    /// New values, `[tokens, N, Dv]`; none to write keys alone.
    pub value: Option<TensorDesc>,
    /// Cache of the values, as that of the keys.
    pub value_cache: Option<TensorDesc>,
    /// For the compressed modes.
    pub compress_lens: Option<TensorDesc>,
    /// For the compressed modes.
    pub compress_seq_offset: Option<TensorDesc>,
    /// For the compressed modes.
    pub seq_lens: Option<TensorDesc>,
    /// Order of the caches: `Norm` (also null) or `PA_NZ`.
    pub cache_mode: Option<&'a str>,
    /// How tokens are chosen: `None` (also null), `Alibi`, `Rope`, `Omni` or `Nct`.
    pub scatter_mode: Option<&'a str>,
    /// Steps of keys and values; null means 1 and 1.
    pub strides: Option<&'a [i64]>,
    /// First elements of keys and values; null means 0 and 0.
    pub offsets: Option<&'a [i64]>,
}
