//! A call that owns what a [`FiaCall`] borrows, so that any of its fields can be changed.

use ascend_attention::case::AttentionCase;
use ascend_attention::spec::ops::fused_infer_attention_score::{CheckedCall, FiaCall, Version};
use ascend_attention::spec::{Layout, Soc, Target, TensorDesc};

/// A call of one golden case, or one with a field changed.
#[derive(Clone, Debug)]
pub struct Call {
    /// Everything but lists and arrays.
    pub plain: FiaCall<'static>,
    pub key: Vec<TensorDesc>,
    pub value: Vec<TensorDesc>,
    pub actual_seq_lengths: Option<Vec<i64>>,
    pub actual_seq_lengths_kv: Option<Vec<i64>>,
    pub actual_shared_prefix_len: Option<Vec<i64>>,
}

/// What became of a call.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Answer {
    /// Refused, by this rule.
    Rule(&'static str),
    /// Accepted with these lints.
    Lints(Vec<&'static str>),
    /// This release does not compute it.
    Unsupported(String),
}

impl Call {
    /// The call of a case.
    pub fn of(case: &AttentionCase) -> Self {
        let description = case.describe();
        let call = description.call();
        let layout = Layout::parse(call.input_layout).map_or("", Layout::as_str);
        let owned = |lengths: Option<&[i64]>| lengths.map(<[i64]>::to_vec);
        Self {
            key: call.key.to_vec(),
            value: call.value.to_vec(),
            actual_seq_lengths: owned(call.actual_seq_lengths),
            actual_seq_lengths_kv: owned(call.actual_seq_lengths_kv),
            actual_shared_prefix_len: owned(call.actual_shared_prefix_len),
            plain: FiaCall {
                key: &[],
                value: &[],
                actual_seq_lengths: None,
                actual_seq_lengths_kv: None,
                actual_shared_prefix_len: None,
                q_start_idx: None,
                kv_start_idx: None,
                input_layout: layout,
                ..call
            },
        }
    }

    fn borrow(&self) -> FiaCall<'_> {
        FiaCall {
            key: &self.key,
            value: &self.value,
            actual_seq_lengths: self.actual_seq_lengths.as_deref(),
            actual_seq_lengths_kv: self.actual_seq_lengths_kv.as_deref(),
            actual_shared_prefix_len: self.actual_shared_prefix_len.as_deref(),
            ..self.plain.clone()
        }
    }

    /// Hands the checked call to `work`; the call is one that the contract takes.
    pub fn resolved<R>(&self, work: impl FnOnce(&CheckedCall<'_>) -> R) -> R {
        let call = self.borrow();
        let checked = call.check(Version::oldest_for(&call), Target::snapshot(Soc::AtlasA2));
        work(&checked.unwrap())
    }

    /// What the contract says: as the safe layer asks it, with the oldest version that can express the call.
    pub fn answer(&self) -> Answer {
        let call = self.borrow();
        match call.check(Version::oldest_for(&call), Target::snapshot(Soc::AtlasA2)) {
            Ok(checked) => {
                let mut lints = Vec::new();
                checked.each_lint(&mut |lint| lints.push(lint.rule.id));
                lints.sort_unstable();
                lints.dedup();
                Answer::Lints(lints)
            }
            Err(violation) if violation.is_unsupported() => Answer::Unsupported(violation.given),
            Err(violation) => Answer::Rule(violation.rule.id),
        }
    }
}
