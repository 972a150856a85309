//! Settings that the attention operators of inference share, beside tensors and masks.

use ascend_spec::Layout;
use ascend_spec::ops::fused_infer_attention_score::FiaCall;

use crate::error::Result;
use crate::operator::{Lengths, heads};

/// CANN's `innerPrecise`: precision, and what becomes of rows that a mask tensor leaves without keys.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum InnerPrecise {
    /// High precision. Rows without keys come out as the mean of the values.
    #[default]
    HighPrecision = 0,
    /// High performance (matters for f16 alone). Rows without keys come out as the mean of the values.
    HighPerformance = 1,
    /// High precision; rows without keys come out as 0. With a single query row a sequence from CANN 8.5 on.
    HighPrecisionCorrected = 2,
    /// High performance; rows without keys come out as 0. With a single query row a sequence from CANN 8.5 on.
    HighPerformanceCorrected = 3,
}

/// Settings of FusedInferAttentionScore, PromptFlashAttention and IncreFlashAttention.
#[derive(Clone, Debug)]
pub(crate) struct Settings {
    pub(crate) layout: Layout,
    pub(crate) num_heads: Option<usize>,
    pub(crate) num_key_value_heads: Option<usize>,
    pub(crate) scale: Option<f64>,
    pub(crate) inner_precise: InnerPrecise,
    actual_seq_lengths: Option<Lengths>,
    actual_seq_lengths_kv: Option<Lengths>,
}

/// Numbers of a call, as operators take them.
pub(crate) struct Numbers {
    pub(crate) num_heads: i64,
    pub(crate) num_key_value_heads: i64,
    pub(crate) scale: f64,
    pub(crate) inner_precise: i64,
}

impl Settings {
    pub(crate) fn new(layout: Layout) -> Self {
        Self {
            layout,
            num_heads: None,
            num_key_value_heads: None,
            scale: None,
            inner_precise: InnerPrecise::default(),
            actual_seq_lengths: None,
            actual_seq_lengths_kv: None,
        }
    }

    /// Sets the lengths of the queries.
    pub(crate) fn give_queries(&mut self, lengths: Vec<usize>) {
        self.actual_seq_lengths = Some(Lengths::new("actual_seq_lengths", lengths));
    }

    /// Sets the lengths of the keys.
    pub(crate) fn give_keys(&mut self, lengths: Vec<usize>) {
        self.actual_seq_lengths_kv = Some(Lengths::new("actual_seq_lengths_kv", lengths));
    }

    /// Lengths of the queries.
    pub(crate) fn queries(&self) -> Result<Option<&[i64]>> {
        Lengths::given(&self.actual_seq_lengths)
    }

    /// Lengths of the keys.
    pub(crate) fn keys(&self) -> Result<Option<&[i64]>> {
        Lengths::given(&self.actual_seq_lengths_kv)
    }

    /// Returns the settings as numbers, with the defaults that all of these operators have for what is not set.
    pub(crate) fn numbers(&self) -> Result<Numbers> {
        let defaults = FiaCall::new(self.layout.as_str());
        let key_heads = heads("num_key_value_heads", self.num_key_value_heads)?;
        Ok(Numbers {
            num_heads: heads("num_heads", self.num_heads)?.unwrap_or(defaults.num_heads),
            num_key_value_heads: key_heads.unwrap_or(defaults.num_key_value_heads),
            scale: self.scale.unwrap_or(defaults.scale),
            inner_precise: self.inner_precise as i64,
        })
    }
}

/// The setters that every description with a field `settings` has.
macro_rules! setters {
    () => {
        /// Number of query heads (`numHeads`). Unset: 1.
        pub fn heads(mut self, num_heads: usize) -> Self {
            self.settings.num_heads = Some(num_heads);
            self
        }

        /// Number of key and value heads, a divisor of the query heads (`numKeyValueHeads`). Unset: as many as query
        /// heads.
        pub fn kv_heads(mut self, num_key_value_heads: usize) -> Self {
            self.settings.num_key_value_heads = Some(num_key_value_heads);
            self
        }

        /// Factor of the scores, usually `1 / sqrt(D)` (`scaleValue`). It has no default: a call without one is
        /// refused, as the operator's own, 1, is hardly ever meant.
        pub fn scale(mut self, scale: f64) -> Self {
            self.settings.scale = Some(scale);
            self
        }

        /// Precision (`innerPrecise`). Unset: [`InnerPrecise::HighPrecision`](crate::InnerPrecise::HighPrecision).
        /// The Atlas inference series has high performance alone.
        pub fn inner_precise(mut self, inner_precise: crate::InnerPrecise) -> Self {
            self.settings.inner_precise = inner_precise;
            self
        }
    };
}

pub(crate) use setters;
