//! The rules of FusedInferAttentionScore, grouped as the operator's own checks are.
//!
//! Each file declares its rules as data and, below them, the code that applies them.

pub mod antiquant;
pub mod api_layer;
pub mod ascend950;
pub mod contents;
pub mod entry;
pub mod heads;
pub mod lengths;
pub mod lints;
pub mod lists;
pub mod mask;
pub mod mla;
pub(crate) mod mla_quantised;
pub mod output;
pub mod packed;
pub mod padding;
pub mod paged;
pub mod prefix;
pub mod pse;
pub mod quant;
pub mod sink;
pub mod split_fuse;
pub mod unified;

use crate::layout::Extents;
use crate::ops::fused_infer_attention_score::{Cache, Checker, FiaCall, Parameter, Route, Version};
use crate::{Cann, DType, Layout, Rule, Target, TensorDesc};
use std::fmt;
use std::ops::Range;

/// Every rule, in the order of the files.
pub fn all() -> impl Iterator<Item = &'static Rule> {
    [
        entry::RULES,
        api_layer::RULES,
        heads::RULES,
        lists::RULES,
        lengths::RULES,
        packed::RULES,
        paged::RULES,
        mask::RULES,
        output::RULES,
        padding::RULES,
        prefix::RULES,
        pse::RULES,
        sink::RULES,
        quant::RULES,
        antiquant::RULES,
        mla::RULES,
        split_fuse::RULES,
        unified::form::RULES,
        unified::lists::RULES,
        unified::masks::RULES,
        unified::output::RULES,
        unified::pages::RULES,
        unified::quant::RULES,
        unified::rope::RULES,
        unified::features::RULES,
        ascend950::RULES,
        ascend950::antiquant::RULES,
        ascend950::fp8::RULES,
        ascend950::full_quant::RULES,
        ascend950::mxfp8::RULES,
        contents::RULES,
    ]
    .into_iter()
    .flatten()
    .copied()
    .chain(lints::all())
}

/// Parameters that rules name together.
impl Parameter {
    const SHARED_PREFIX: [Parameter; 2] = [Parameter::KeySharedPrefix, Parameter::ValueSharedPrefix];
    const LEFT_PADDING: [Parameter; 2] = [Parameter::QueryPaddingSize, Parameter::KvPaddingSize];
    /// Scales of an INT8 query: of Q K^T, of the probabilities, of P V.
    const DEQUANTISATION: [Parameter; 3] = [Parameter::DeqScale1, Parameter::QuantScale1, Parameter::DeqScale2];
    const OUTPUT_QUANTISATION: [Parameter; 2] = [Parameter::QuantScale2, Parameter::QuantOffset2];
    const ROTARY: [Parameter; 2] = [Parameter::QueryRope, Parameter::KeyRope];
    const MERGED_ANTIQUANT: [Parameter; 2] = [Parameter::AntiquantScale, Parameter::AntiquantOffset];
    const SPLIT_SCALES: [Parameter; 2] = [Parameter::KeyAntiquantScale, Parameter::ValueAntiquantScale];
    const SPLIT_OFFSETS: [Parameter; 2] = [Parameter::KeyAntiquantOffset, Parameter::ValueAntiquantOffset];
    const QUANTISATION_MODES: [Parameter; 4] = [
        Parameter::AntiquantMode,
        Parameter::KeyAntiquantMode,
        Parameter::ValueAntiquantMode,
        Parameter::QueryQuantMode,
    ];
}

/// An optional tensor and its name, in a message.
struct Given<'a>(Option<&'a TensorDesc>, &'static str);

impl fmt::Display for Given<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Some(desc) => desc.fmt(f),
            None => write!(f, "no {}", self.1),
        }
    }
}

/// The facts about a call that the rules read.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Facts<'a> {
    pub(crate) call: &'a FiaCall<'a>,
    pub(crate) version: Version,
    pub(crate) query: &'a TensorDesc,
    pub(crate) key: &'a TensorDesc,
    pub(crate) value: &'a TensorDesc,
    pub(crate) out: &'a TensorDesc,
    pub(crate) layout: Layout,
    pub(crate) target: Target,
    pub(crate) checker: Checker,
    /// Whether the unified checker treats the call as having a single query row a sequence, and ignores its mode and
    /// tokens. Never on Ascend 950.
    pub(crate) single: bool,
    /// Whether the call has one query row a sequence in a layout with a batch axis, on Ascend 950 too.
    pub(crate) one_row: bool,
    pub(crate) route: Route,
    /// Number of sequences; with packed layouts, only the length array has it.
    pub(crate) batch: i64,
    /// Extents of the query; packed layouts have batch 1 and all rows.
    pub(crate) q: Extents,
    /// Heads of key and value, with 0 resolved.
    pub(crate) kv_heads: i64,
    /// Number of key or value elements in one stored element: eight INT4 where both tensors are INT32, otherwise 1.
    pub(crate) nibbles: i64,
    /// The memory layout of the cache, if it is paged.
    pub(crate) cache: Option<Cache>,
    /// Extents of the first key; of a paged cache: blocks and tokens in a block.
    pub(crate) k: Extents,
    /// Extents of the first value.
    pub(crate) v: Extents,
    /// Whether every batch entry has its own key and value.
    pub(crate) kv_list: bool,
    /// Most keys that a sequence can have: rows of the longest key, or of a block table's row.
    pub(crate) key_rows: i64,
    /// Rows of the shared prefix.
    pub(crate) prefix: i64,
}

impl Facts<'_> {
    pub(crate) fn paged(&self) -> bool {
        self.cache.is_some()
    }

    /// Number of blocks in a paged cache.
    pub(crate) fn blocks(&self) -> i64 {
        self.key.shape.first().copied().unwrap_or(0)
    }

    pub(crate) fn packed(&self) -> bool {
        self.layout.is_packed()
    }

    pub(crate) fn rope(&self) -> bool {
        self.call.query_rope.is_some()
    }

    pub(crate) fn prefill(&self) -> bool {
        self.route == Route::Prefill
    }

    /// Dtype of key and value; INT4 where they hold packed nibbles.
    pub(crate) fn kv_dtype(&self) -> DType {
        match self.nibbles {
            1 => self.key.dtype,
            _ => DType::Int4,
        }
    }

    /// Whether key and value are quantised and the query is not.
    pub(crate) fn antiquant(&self) -> bool {
        matches!(self.kv_dtype(), DType::Int8 | DType::Int4) && self.query.dtype != DType::Int8
    }

    /// Whether the call is multi-head latent attention over the compressed cache.
    pub(crate) fn absorbed(&self) -> bool {
        self.rope() && self.q.dim == 512
    }

    /// Query length of sequence `b`.
    pub(crate) fn q_len(&self, b: usize) -> i64 {
        lengths::q_len(self.call, self.layout, self.q.rows, b)
    }

    /// Key length of sequence `b`, without a shared prefix.
    pub(crate) fn kv_len(&self, b: usize) -> i64 {
        lengths::kv_len(self.call, self.layout, self.paged(), self.rows_of(b), b)
    }

    /// Rows that the key of sequence `b` could have.
    pub(crate) fn rows_of(&self, b: usize) -> i64 {
        if !self.kv_list {
            return self.key_rows;
        }
        let extents = |key: &TensorDesc| self.layout.input().extents(&key.shape, self.kv_heads);
        self.call.key.get(b).and_then(extents).map_or(0, |own| own.rows)
    }

    pub(crate) fn batch(&self) -> usize {
        usize::try_from(self.batch).unwrap_or(usize::MAX)
    }

    /// The sequences that a check must examine: see [`lengths::distinct`].
    pub(crate) fn sequences(&self) -> Range<usize> {
        0..lengths::distinct(self.call, self.batch())
    }

    /// Keys that a row of a full mask or position bias covers in the prefill path.
    pub(crate) fn mask_width(&self) -> i64 {
        if self.paged() {
            let bs = self.call.block_size.max(1);
            let longest = self.longest_key().max(0);
            (longest / bs + i64::from(longest % bs != 0)).saturating_mul(bs)
        } else {
            let prefix = match self.since(Cann::V8_5) {
                true => prefix::length(self),
                false => self.prefix,
            };
            self.key_rows.saturating_add(prefix)
        }
    }

    /// The longest key length, without a shared prefix.
    pub(crate) fn longest_key(&self) -> i64 {
        match self.call.actual_seq_lengths_kv {
            None | Some([]) => self.key_rows,
            Some(&[one]) if self.batch > 0 && (self.paged() || !self.packed()) => one,
            Some(all) if all.len() >= self.batch() && (self.paged() || !self.packed()) => {
                all.iter().take(self.batch()).copied().max().unwrap_or(0)
            }
            Some(_) => self.sequences().map(|b| self.kv_len(b)).max().unwrap_or(0),
        }
    }
}

/// The dtype of the elements: `INT32` keys and values are eight packed `INT4` each.
pub(crate) fn unpacked(dtype: DType) -> DType {
    if dtype == DType::Int32 { DType::Int4 } else { dtype }
}

/// `1 or 4`, and `1` where that is all.
pub(crate) struct OneOr(pub(crate) i64);

impl fmt::Display for OneOr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            1 => f.write_str("1"),
            size => write!(f, "1 or {size}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Level;

    #[test]
    fn ids_are_unique_and_rules_complete() {
        let mut ids: Vec<_> = all().map(|rule| rule.id).collect();
        let count = ids.len();
        ids.sort_unstable();
        ids.dedup();
        assert_eq!(ids.len(), count);
        for rule in all() {
            assert!(rule.id.contains('.'), "{}", rule.id);
            assert!(!rule.source.is_empty() && !rule.holds.ends_with('.'), "{}", rule.id);
            assert!(!rule.fix.is_empty() && !rule.fix.ends_with('.') && rule.fix != rule.holds, "{}", rule.id);
            match rule.level {
                Level::Rule => assert_ne!(rule.status, 0, "{}", rule.id),
                Level::Lint => assert_eq!(rule.status, 0, "{}", rule.id),
                Level::HostCrash => {}
                Level::Library | Level::Unsupported => panic!("{} is no operator's", rule.id),
            }
            assert_eq!(rule.reach.is_empty(), rule.level == Level::Rule, "{}", rule.id);
        }
    }
}
