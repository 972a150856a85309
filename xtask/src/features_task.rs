//! `features`: writes or checks the book's table of features by product and release, which it finds by checking
//! probing calls for each row against the contract.

use crate::marked::Marked;
use ascend_spec::ops::fused_infer_attention_score::{FiaCall, Version};
use ascend_spec::{Cann, DType, Dims, Extents, Layout, Soc, Target, TensorDesc};
use std::fmt::Write as _;
use std::path::Path;

const TABLE: Marked<'_> = Marked { page: "docs/src/features.md", name: "features", task: "features" };

const HEAD: &str = "
| | A2, A3: 8.1 | 8.5 | 9.0 | 9.1 | 9.2 preview | Ascend 950: 9.0, 9.1 | 9.2 preview |
|---|:-:|:-:|:-:|:-:|:-:|:-:|:-:|
";

/// Writes the table, or compares it with the one in the tree.
pub(crate) fn renew(root: &Path, compare: bool) -> Result<String, String> {
    TABLE.renew(root, &table()?, compare)
}

fn table() -> Result<String, String> {
    let mut text = HEAD.to_owned();
    for row in rows() {
        let feature = row.feature;
        let _ = write!(text, "| {feature} |");
        for cann in Cann::ALL {
            let on = |soc| row.answer(Target::new(soc, cann));
            let (a2, a3) = (on(Soc::AtlasA2)?, on(Soc::AtlasA3)?);
            if a2 != a3 {
                return Err(format!("{feature}: Atlas A2 and A3 differ, which the table cannot show"));
            }
            let _ = write!(text, " {a2} |");
        }
        let on = |cann| row.answer(Target::new(Soc::Ascend950, cann));
        let (old, new) = (on(Cann::V9_0)?, on(Cann::V9_1)?);
        if old != new {
            return Err(format!("{feature}: 9.0 and 9.1 differ on Ascend 950, which the table cannot show"));
        }
        let _ = writeln!(text, " {new} | {} |", on(Cann::V9_2)?);
    }
    text.push('\n');
    Ok(text)
}

/// Whether a target takes a call, by `version` if one is given, otherwise by the oldest entry point that can express
/// the call.
fn answer(call: &FiaCall<'_>, version: Option<Version>, target: Target) -> &'static str {
    let oldest = match target.soc {
        Soc::Ascend950 => Version::V5,
        _ => Version::oldest_for(call),
    };
    let version = version.unwrap_or(oldest);
    // The snapshot that is checked in place of 8.1 has a newer entry point than the release.
    if version > Version::newest_of(target.cann) {
        return "–";
    }
    match call.check(version, target) {
        Ok(_) => "yes",
        Err(violation) if violation.is_unsupported() => "not emulated",
        Err(_) => "–",
    }
}

/// A row: a feature, and calls that need it, with the entry point if the feature is one.
struct Row {
    feature: &'static str,
    calls: Vec<(Option<Version>, FiaCall<'static>)>,
}

impl Row {
    /// A target's answer to the calls, all of which it must take or all refuse.
    fn answer(&self, target: Target) -> Result<&'static str, String> {
        let answers = self.calls.iter();
        let mut answers = answers.map(|(version, call)| answer(call, *version, target));
        let first = answers.next().unwrap_or("–");
        match answers.all(|answer| answer == first) {
            true => Ok(first),
            false => {
                Err(format!("{}: {target} takes some of the calls only, which the table cannot show", self.feature))
            }
        }
    }
}

/// Sizes of a probing call.
#[derive(Clone, Copy)]
struct Probe {
    layout: &'static str,
    dtype: DType,
    heads: i64,
    kv_heads: i64,
    rows: i64,
    dim: i64,
    value_dim: i64,
}

const BATCH: i64 = 2;
const KEYS: i64 = 100;
const BLOCKS: i64 = 4;

/// Keeps what the table's calls borrow until the program ends, since the table is made only once.
fn kept<T>(all: Vec<T>) -> &'static [T] {
    Box::leak(all.into_boxed_slice())
}

fn of(dtype: DType, shape: &[i64]) -> Option<TensorDesc> {
    TensorDesc::contiguous(dtype, shape)
}

/// BF16, 8 heads over 2 of 128 channels.
fn probe(layout: &'static str, rows: i64) -> Probe {
    Probe { layout, dtype: DType::Bf16, heads: 8, kv_heads: 2, rows, dim: 128, value_dim: 128 }
}

impl Probe {
    fn dims(self, dim: i64, value_dim: i64) -> Probe {
        Probe { dim, value_dim, ..self }
    }

    fn heads(self, heads: i64, kv_heads: i64) -> Probe {
        Probe { heads, kv_heads, ..self }
    }

    fn of_dtype(self, dtype: DType) -> Probe {
        Probe { dtype, ..self }
    }

    fn axes(self) -> Layout {
        Layout::parse(self.layout).unwrap_or(Layout::Bnsd)
    }

    fn extents(self, heads: i64, rows: i64, dim: i64) -> Extents {
        let (batch, rows) = match self.axes().is_packed() {
            true => (1, BATCH * rows),
            false => (BATCH, rows),
        };
        Extents { batch, heads, rows, dim }
    }

    fn input(self, heads: i64, rows: i64, dim: i64) -> TensorDesc {
        let shape = self.axes().input().shape(self.extents(heads, rows, dim));
        TensorDesc::packed(self.dtype, shape)
    }

    fn out(self, dtype: DType) -> Option<TensorDesc> {
        let extents = self.extents(self.heads, self.rows, self.value_dim);
        Some(TensorDesc::packed(dtype, self.axes().out_shape(extents)))
    }

    fn lse(self, call: FiaCall<'static>) -> FiaCall<'static> {
        let extents = self.extents(self.heads, self.rows, 1);
        FiaCall {
            softmax_lse_flag: true,
            softmax_lse: Some(TensorDesc::packed(DType::Float, self.axes().lse_shape(extents))),
            ..call
        }
    }

    fn dense(self) -> FiaCall<'static> {
        let ends = |len: i64| kept((1..=BATCH).map(|b| b * len).collect());
        let packed = self.axes().is_packed();
        FiaCall {
            query: Some(self.input(self.heads, self.rows, self.dim)),
            key: kept(vec![self.input(self.kv_heads, KEYS, self.dim)]),
            value: kept(vec![self.input(self.kv_heads, KEYS, self.value_dim)]),
            num_heads: self.heads,
            num_key_value_heads: self.kv_heads,
            inner_precise: 1,
            actual_seq_lengths: packed.then(|| ends(self.rows)),
            actual_seq_lengths_kv: packed.then(|| ends(KEYS)),
            attention_out: self.out(self.dtype),
            ..FiaCall::new(self.layout)
        }
    }

    /// A cache of 3, 4 or 5 axes.
    fn cache(self, bs: i64, axes: usize, dim: i64) -> TensorDesc {
        let run = 256 / i64::from(self.dtype.bits().max(1));
        let blocks = BATCH * self.columns(bs);
        let shape = match axes {
            3 => Dims::of([blocks, bs, self.kv_heads * dim]),
            4 => Dims::of([blocks, self.kv_heads, bs, dim]),
            _ => Dims::of([blocks, self.kv_heads, dim / run, bs, run]),
        };
        TensorDesc::packed(self.dtype, shape)
    }

    fn columns(self, bs: i64) -> i64 {
        BLOCKS.max((KEYS + bs - 1) / bs)
    }

    fn paged(self, bs: i64, axes: usize) -> FiaCall<'static> {
        FiaCall {
            key: kept(vec![self.cache(bs, axes, self.dim)]),
            value: kept(vec![self.cache(bs, axes, self.value_dim)]),
            block_table: of(DType::Int32, &[BATCH, self.columns(bs)]),
            block_size: bs,
            actual_seq_lengths_kv: Some(kept(vec![KEYS; BATCH as usize])),
            ..self.dense()
        }
    }

    fn rope(self) -> FiaCall<'static> {
        FiaCall {
            query_rope: Some(self.input(self.heads, self.rows, 64)),
            key_rope: Some(self.input(self.kv_heads, KEYS, 64)),
            ..self.dense()
        }
    }

    fn paged_rope(self, bs: i64, axes: usize) -> FiaCall<'static> {
        FiaCall {
            query_rope: Some(self.input(self.heads, self.rows, 64)),
            key_rope: Some(self.cache(bs, axes, 64)),
            ..self.paged(bs, axes)
        }
    }

    /// Single rows over keys of another dtype, with a scale for each channel.
    fn over(self, keys: DType) -> FiaCall<'static> {
        let scale = of(self.dtype, &[1, self.kv_heads, 1, self.dim]);
        let small = self.of_dtype(keys).dense();
        FiaCall {
            key: small.key,
            value: small.value,
            key_antiquant_scale: scale,
            value_antiquant_scale: scale,
            ..self.dense()
        }
    }

    fn quantised_out(self, dtype: DType, scale: &[i64]) -> FiaCall<'static> {
        FiaCall { attention_out: self.out(dtype), quant_scale2: of(DType::Float, scale), ..self.dense() }
    }

    /// A query of the absorbed form in the dtype of the keys.
    fn fully_quantised(self, keys: DType) -> FiaCall<'static> {
        let (small, axes) = (self.of_dtype(keys), 5);
        FiaCall {
            query: Some(small.input(self.heads, self.rows, self.dim)),
            key: kept(vec![small.cache(128, axes, self.dim)]),
            value: kept(vec![small.cache(128, axes, self.dim)]),
            dequant_scale_query: of(DType::Float, &[BATCH, self.rows, self.heads]),
            key_antiquant_scale: of(DType::Float, &[1]),
            value_antiquant_scale: of(DType::Float, &[1]),
            query_quant_mode: 3,
            ..self.paged_rope(128, axes)
        }
    }
}

fn causal(call: FiaCall<'static>) -> FiaCall<'static> {
    FiaCall { sparse_mode: 3, atten_mask: of(DType::Bool, &[2048, 2048]), ..call }
}

fn sink(call: FiaCall<'static>, dtype: DType) -> FiaCall<'static> {
    FiaCall { learnable_sink: of(dtype, &[call.num_heads]), inner_precise: 0, ..call }
}

/// Packed BF16 rows over INT8 keys in an NZ cache.
fn packed_nz() -> FiaCall<'static> {
    let p = probe("TND", 1);
    let scale = of(DType::Bf16, &[2, 128]);
    let cache = p.of_dtype(DType::Int8).paged(128, 5);
    FiaCall {
        key: cache.key,
        value: cache.value,
        key_antiquant_scale: scale,
        value_antiquant_scale: scale,
        ..p.paged(128, 5)
    }
}

/// FP4 keys in groups of 32 elements.
fn fp4_keys() -> FiaCall<'static> {
    let scale = of(DType::Float8E8M0, &[1, BATCH, 2, KEYS, 128 / 32]);
    FiaCall {
        key_antiquant_scale: scale,
        value_antiquant_scale: scale,
        key_antiquant_mode: 6,
        value_antiquant_mode: 6,
        ..probe("BNSD", 1).over(DType::Float4E2M1)
    }
}

fn mxfp8() -> FiaCall<'static> {
    let p = probe("TND", 16).of_dtype(DType::Float8E4M3Fn);
    let (t, pairs) = (BATCH * p.rows, p.dim / 64);
    let groups = BATCH * ((KEYS + 63) / 64);
    let scale = |shape: &[i64]| of(DType::Float8E8M0, shape);
    FiaCall {
        dequant_scale_query: scale(&[t, p.heads, pairs, 2]),
        key_antiquant_scale: scale(&[BATCH * KEYS, p.kv_heads, pairs, 2]),
        value_antiquant_scale: scale(&[groups, p.kv_heads, p.dim, 2]),
        query_quant_mode: 6,
        key_antiquant_mode: 6,
        value_antiquant_mode: 8,
        attention_out: p.out(DType::Bf16),
        ..p.dense()
    }
}

fn rows() -> Vec<Row> {
    let half = |layout| probe(layout, 16).of_dtype(DType::Float16);
    let latent = |rows| probe("BSND", rows).heads(32, 1).dims(512, 512);
    let tree = FiaCall { sparse_mode: 9, atten_mask: of(DType::Bool, &[BATCH, 4, 4]), ..probe("BSND", 4).rope() };
    let plain = || probe("BNSD", 16).dense();
    let each = |feature, calls: &[FiaCall<'static>]| Row {
        feature,
        calls: calls.iter().map(|call| (None, call.clone())).collect(),
    };
    let feature = |feature, call| each(feature, &[call]);
    let entry = |feature, versions: &[Version]| Row {
        feature,
        calls: versions.iter().map(|&version| (Some(version), plain())).collect(),
    };
    let classic = ["BSH", "BSND", "BNSD", "BNSD_BSND"];
    let reordered = ["NTD", "BSH_BNSD", "BSND_BNSD"];
    let prefix = Some(TensorDesc::packed(DType::Bf16, Dims::of([1, 2, 16, 128])));
    vec![
        entry("entry points V1 to V3", &[Version::V1, Version::V2, Version::V3]),
        entry("entry point V4", &[Version::V4]),
        entry("entry point V5", &[Version::V5]),
        each("BSH, BSND, BNSD, BNSD_BSND", &classic.map(|layout| half(layout).dense())),
        feature("BNSD_BSND of single rows", probe("BNSD_BSND", 1).dense()),
        feature("TND, BF16", probe("TND", 16).dense()),
        feature("TND, FLOAT16", half("TND").dense()),
        feature("TND, 256 channels a head", FiaCall { inner_precise: 0, ..half("TND").dims(256, 256).dense() }),
        each("NTD, BSH_BNSD, BSND_BNSD", &reordered.map(|layout| half(layout).dense())),
        feature("more than 64 query heads a key head", probe("BNSD", 16).heads(130, 1).dense()),
        feature("values narrower than keys", half("BSND").dims(128, 64).dense()),
        each(
            "left padding, shared prefix, position bias",
            &[
                FiaCall { kv_padding_size: of(DType::Int64, &[1]), actual_seq_lengths_kv: Some(&[60, 90]), ..plain() },
                FiaCall { key_shared_prefix: prefix, value_shared_prefix: prefix, ..plain() },
                FiaCall { pse_shift: of(DType::Bf16, &[1, 8, 16, KEYS]), ..plain() },
            ],
        ),
        feature("cache blocks of 16 under several rows", probe("BSND", 16).paged(16, 3)),
        feature("BnNBsD cache under BSND", probe("BSND", 16).paged(128, 4)),
        feature("NZ cache of 16 bits under BSND", probe("BSND", 16).paged(128, 5)),
        feature("rotary parts, 128 + 64, BSND", probe("BSND", 16).rope()),
        feature("192 channels with values of 128, BSND", probe("BSND", 16).dims(192, 128).dense()),
        feature("absorbed MLA over a cache", latent(1).paged_rope(128, 3)),
        feature("absorbed MLA, dense", latent(1).rope()),
        feature("absorbed MLA with log-sum-exp", latent(1).lse(latent(1).paged_rope(128, 3))),
        feature("absorbed MLA of more than 16 rows", causal(latent(20).paged_rope(128, 3))),
        feature("tree mask (sparse mode 9) with rotary parts", tree),
        feature("BF16 sink, packed", sink(probe("TND", 16).dense(), DType::Bf16)),
        feature("BF16 sink, BSND", sink(probe("BSND", 16).dense(), DType::Bf16)),
        feature("FLOAT16 sink, packed", sink(half("TND").dense(), DType::Float16)),
        feature("INT8 output", probe("BNSD", 16).quantised_out(DType::Int8, &[1])),
        feature("INT8 output, a scale a channel, log-sum-exp", {
            let p = probe("BNSD", 16);
            p.lse(p.quantised_out(DType::Int8, &[8, 128]))
        }),
        each(
            "E4M3 and HIF8 output",
            &[DType::Float8E4M3Fn, DType::HiFloat8].map(|dtype| probe("BNSD", 16).quantised_out(dtype, &[1])),
        ),
        feature("INT8 keys, single rows", probe("BNSD", 1).over(DType::Int8)),
        feature("INT8 keys in an NZ cache, TND", packed_nz()),
        feature("INT4 keys", probe("BNSD", 1).over(DType::Int4)),
        feature("E4M3 keys", probe("BNSD", 16).over(DType::Float8E4M3Fn)),
        feature("HIF8 keys", probe("BNSD", 16).over(DType::HiFloat8)),
        feature("FP4 keys", fp4_keys()),
        feature("INT8 query of absorbed MLA", latent(1).fully_quantised(DType::Int8)),
        feature("INT8 query of absorbed MLA, 32 rows", causal(latent(32).fully_quantised(DType::Int8))),
        feature("E4M3 query of absorbed MLA", latent(1).fully_quantised(DType::Float8E4M3Fn)),
        feature("MXFP8", mxfp8()),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_in_the_tree_is_current() {
        renew(&crate::root(), true).unwrap();
    }

    #[test]
    fn every_feature_is_there_somewhere() {
        let table = table().unwrap();
        for line in table.lines().filter(|line| line.starts_with("| ")).skip(1) {
            assert!(line.contains("yes") || line.contains("emulated"), "{line}");
        }
    }
}
