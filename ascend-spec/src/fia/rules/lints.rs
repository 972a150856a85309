//! Calls that the operator takes and then ignores, misreads or overruns an argument of.

use crate::fia::{FiaCall, MaskUse, Problem, Route, Work};
use crate::rule::{broken, rules};
use crate::{SparseMode, TOKENS_UNBOUNDED, TensorDesc, Violation};
use std::fmt;

rules! {
    OUT_SHAPE = "attention_out.shape_unchecked", Lint, V1, "checks B9, J4",
        "attentionOut has the shape that the operator writes",
        "make attentionOut of this shape";
    VALUE_SHAPE = "value.shape_unchecked", Lint, V1, "check J17",
        "the value has the key's batch size and rows",
        "give the value its key's shape: the operator reads it by the key's rows";
    LSE_SHAPE = "softmax_lse.unchecked", Lint, V1, "check J13",
        "softmaxLse is a FLOAT tensor of shape [B, N, S, 1] when softmaxLseFlag is true",
        "pass a softmaxLse of this shape, or set softmaxLseFlag to false";
    LIST_IGNORED = "key.list_ignored", Lint, V1, "check J16",
        "every tensor of the key and value lists is used",
        "pass the tensors that are used only";
    LENGTHS_IGNORED = "actual_seq_lengths.ignored", Lint, V1, "checks E1, F7",
        "the length arrays have no entries beyond the batch, and no query lengths with a single row a sequence but 1",
        "drop the entries that are not used";
    PRECISE = "inner_precise.meaning", Lint, V1, "check J20",
        "innerPrecise is from 0 to 3",
        "0 is high precision, 1 high performance; 2 and 3 also correct rows without visible keys";
    WINDOW = "tokens.without_mask", Lint, V1, "FusedInferAttentionScore documentation, sparseMode",
        "preTokens and nextTokens are unbounded where the operator ignores them",
        "a window needs mode 4 with the compressed mask, or mode 0 with a mask and several query rows";
    MODE = "sparse_mode.without_mask", Lint, V1, "check F14",
        "a sparse mode that hides keys has a mask in the decode path",
        "pass the mask, or mode 0: the operator lets the row see every key";
    STRIDED = "tensor.strided", Lint, V1, "FusedInferAttentionScore documentation, constraints",
        "every tensor is contiguous",
        "copy the tensor to a contiguous one: newer CANN releases refuse strided ones";
    MASK_HEADS = "atten_mask.head_axis", Lint, V1, "check E4.3",
        "the axis of a full mask between batch and rows has size 1",
        "the operator has one mask for all heads: drop the axis";
}

impl Problem<'_> {
    /// The first lint that the call breaks, leaving out those in `allowed` (by id).
    ///
    /// # Errors
    /// The broken lint, with the same fields as a broken rule.
    pub fn lint(&self, allowed: &[&str]) -> Result<(), Violation> {
        let mut first = None;
        self.each_lint(&mut |violation| {
            if first.is_none() && !allowed.contains(&violation.rule.id) {
                first = Some(violation);
            }
        });
        first.map_or(Ok(()), Err)
    }

    /// Calls `report` with every lint that the call breaks.
    pub fn each_lint(&self, report: &mut dyn FnMut(Violation)) {
        let call = self.call;
        for (desc, name) in tensors(call) {
            if !desc.is_contiguous() {
                report(broken(
                    &STRIDED,
                    format_args!("{name} {desc}"),
                    "row-major strides",
                    format_args!(
                        "copy {name} to a contiguous tensor: newer CANN releases refuse strided ones"
                    ),
                ));
            }
        }
        self.outputs(report);
        if self.work != Work::Attend {
            return;
        }
        self.lists_and_lengths(report);
        if !(0..=3).contains(&call.inner_precise) {
            report(broken(&PRECISE, call.inner_precise, "0 to 3", PRECISE.fix));
        }
        self.masking(report);
    }

    fn outputs(&self, report: &mut dyn FnMut(Violation)) {
        let call = self.call;
        let size = |value: usize| i64::try_from(value).unwrap_or(i64::MAX);
        let mut of = crate::Extents {
            batch: size(self.batch),
            heads: size(self.heads),
            rows: size(self.query_rows),
            dim: size(self.value_dim),
        };
        let want = self.layout.out_shape(of);
        if let Some(out) = call.attention_out.filter(|out| out.shape != want) {
            report(broken(&OUT_SHAPE, out.shape, want, OUT_SHAPE.fix));
        }
        of.dim = 1;
        let want = TensorDesc::packed(crate::DType::Float, self.layout.lse_shape(of));
        if call.softmax_lse_flag
            && !call
                .softmax_lse
                .is_some_and(|lse| lse.shape == want.shape && lse.dtype == want.dtype)
        {
            report(broken(
                &LSE_SHAPE,
                Given(call.softmax_lse.as_ref()),
                want,
                LSE_SHAPE.fix,
            ));
        }
    }

    fn lists_and_lengths(&self, report: &mut dyn FnMut(Violation)) {
        let call = self.call;
        let used = if self.kv_list { self.batch } else { 1 };
        if call.key.len() > used || call.value.len() > used {
            report(broken(
                &LIST_IGNORED,
                format_args!("{} keys, {} values", call.key.len(), call.value.len()),
                used,
                LIST_IGNORED.fix,
            ));
        }
        if let ([key, ..], [value, ..]) = (call.key, call.value)
            && key.shape != value.shape
        {
            report(broken(
                &VALUE_SHAPE,
                format_args!("key {}, value {}", key.shape, value.shape),
                key.shape,
                VALUE_SHAPE.fix,
            ));
        }
        for (lengths, name) in [
            (call.actual_seq_lengths, "actualSeqLengths"),
            (call.actual_seq_lengths_kv, "actualSeqLengthsKv"),
        ] {
            let Some(lengths) = lengths else { continue };
            let ignored = self.route == Route::Decode
                && name == "actualSeqLengths"
                && lengths.iter().any(|&len| len != 1);
            if lengths.len() > self.batch.max(1) || ignored {
                report(broken(
                    &LENGTHS_IGNORED,
                    format_args!("{name} with {} entries", lengths.len()),
                    format_args!(
                        "at most {} entries, 1 each for single query rows",
                        self.batch
                    ),
                    format_args!("drop the entries of {name} that are not used"),
                ));
            }
        }
    }

    fn masking(&self, report: &mut dyn FnMut(Violation)) {
        let call = self.call;
        let mode = SparseMode::from_acl(call.sparse_mode);
        let unmasked = self.mask == MaskUse::None;
        let reads_tokens = match self.route {
            Route::Prefill => {
                mode == Some(SparseMode::DefaultMask) && !unmasked || mode == Some(SparseMode::Band)
            }
            Route::Decode => mode == Some(SparseMode::Band) && !unmasked,
        };
        // Mode 3 implies its tokens; clients pass the window of the mode they came from.
        let implied = matches!(
            mode,
            Some(SparseMode::LeftUpCausal | SparseMode::RightDownCausal)
        );
        let unbounded = |tokens: i64| tokens >= TOKENS_UNBOUNDED;
        let bounded = !unbounded(call.pre_tokens) || !unbounded(call.next_tokens);
        if bounded && !reads_tokens && !implied {
            report(broken(
                &WINDOW,
                format_args!(
                    "preTokens {}, nextTokens {}",
                    call.pre_tokens, call.next_tokens
                ),
                format_args!("{}", FiaCall::ALL_TOKENS),
                WINDOW.fix,
            ));
        }
        // A single row sees every key in mode 3 as well as without any mask.
        if self.route == Route::Decode
            && unmasked
            && !matches!(
                mode,
                Some(SparseMode::DefaultMask | SparseMode::RightDownCausal)
            )
        {
            report(broken(
                &MODE,
                format_args!("sparseMode {} without a mask", call.sparse_mode),
                "0 or 3 without a mask",
                MODE.fix,
            ));
        }
        if let (MaskUse::Full(_), Some(mask)) = (self.mask, &call.atten_mask) {
            let middle = match mask.shape[..] {
                [_, heads, _, _] => heads,
                [_, rows, _] if self.route == Route::Decode => rows,
                _ => 1,
            };
            let lone = self.route == Route::Decode && mask.shape.rank() < 2;
            if middle != 1 || lone {
                report(broken(
                    &MASK_HEADS,
                    mask.shape,
                    "[B, 1, Sq, Skv], [B, Sq, Skv] or [Sq, Skv]",
                    MASK_HEADS.fix,
                ));
            }
        }
    }
}

/// Every tensor of a call with its CANN name.
fn tensors<'a>(call: &'a FiaCall<'a>) -> impl Iterator<Item = (&'a TensorDesc, &'static str)> {
    let one = |desc: &'a Option<TensorDesc>, name| desc.iter().map(move |desc| (desc, name));
    one(&call.query, "query")
        .chain(call.key.iter().map(|desc| (desc, "key")))
        .chain(call.value.iter().map(|desc| (desc, "value")))
        .chain(one(&call.atten_mask, "attenMask"))
        .chain(one(&call.attention_out, "attentionOut"))
        .chain(one(&call.softmax_lse, "softmaxLse"))
}

/// A tensor that may be missing, in a message.
struct Given<'a>(Option<&'a TensorDesc>);

impl fmt::Display for Given<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Some(desc) => desc.fmt(f),
            None => f.write_str("no softmaxLse"),
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::fia::{FiaCall, Version};
    use crate::{DType, Dims, Soc, TensorDesc};

    fn lints(call: &FiaCall<'_>) -> Vec<&'static str> {
        let mut ids = Vec::new();
        let problem = call.check(Version::V4, Soc::AtlasA2).unwrap();
        problem.each_lint(&mut |violation| ids.push(violation.rule.id));
        assert_eq!(problem.lint(&[]).is_err(), !ids.is_empty());
        assert!(problem.lint(&ids).is_ok());
        ids
    }

    #[test]
    fn each_lint_is_found_and_a_clean_call_has_none() {
        let half = |shape: &[i64]| TensorDesc::contiguous(DType::Float16, shape).unwrap();
        let mask = |shape: &[i64]| TensorDesc::contiguous(DType::Bool, shape);
        let key = [half(&[2, 64, 4, 32])];
        let short = [half(&[2, 63, 4, 32])];
        let two = [key[0], key[0]];
        let prefill = FiaCall {
            query: Some(half(&[2, 16, 4, 32])),
            key: &key,
            value: &key,
            num_heads: 4,
            attention_out: Some(half(&[2, 16, 4, 32])),
            ..FiaCall::new("BSND")
        };
        let decode = FiaCall {
            query: Some(half(&[2, 1, 4, 32])),
            attention_out: Some(half(&[2, 1, 4, 32])),
            ..prefill.clone()
        };
        assert!(lints(&prefill).is_empty());
        assert!(lints(&decode).is_empty());
        let strided = TensorDesc {
            strides: Dims::of([2048, 32, 512, 1]),
            ..half(&[2, 16, 4, 32])
        };
        for (id, call) in [
            (
                "attention_out.shape_unchecked",
                FiaCall {
                    attention_out: Some(half(&[2, 16, 4, 31])),
                    ..prefill.clone()
                },
            ),
            (
                "value.shape_unchecked",
                FiaCall {
                    value: &short,
                    ..prefill.clone()
                },
            ),
            (
                "softmax_lse.unchecked",
                FiaCall {
                    softmax_lse_flag: true,
                    ..decode.clone()
                },
            ),
            (
                "key.list_ignored",
                FiaCall {
                    key: &two,
                    value: &two,
                    ..prefill.clone()
                },
            ),
            (
                "actual_seq_lengths.ignored",
                FiaCall {
                    actual_seq_lengths: Some(&[1, 2, 3]),
                    ..prefill.clone()
                },
            ),
            (
                "actual_seq_lengths.ignored",
                FiaCall {
                    actual_seq_lengths: Some(&[0]),
                    ..decode.clone()
                },
            ),
            (
                "inner_precise.meaning",
                FiaCall {
                    inner_precise: 5,
                    ..prefill.clone()
                },
            ),
            (
                "tokens.without_mask",
                FiaCall {
                    pre_tokens: 8,
                    ..prefill.clone()
                },
            ),
            (
                "sparse_mode.without_mask",
                FiaCall {
                    sparse_mode: 2,
                    ..decode.clone()
                },
            ),
            (
                "tensor.strided",
                FiaCall {
                    query: Some(strided),
                    ..prefill.clone()
                },
            ),
            (
                "atten_mask.head_axis",
                FiaCall {
                    atten_mask: mask(&[2, 4, 16, 64]),
                    ..prefill.clone()
                },
            ),
        ] {
            assert_eq!(lints(&call), [id]);
        }
    }
}
