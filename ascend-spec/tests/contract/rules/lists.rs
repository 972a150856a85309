//! Calls that break the rules on keys and values, in one tensor or in a list.

use ascend_spec::ops::fused_infer_attention_score::FiaCall;
use ascend_spec::{DType, TensorDesc};

use super::{Broken, Good, half};

pub(super) fn calls(broken: &mut Broken, good: &Good<'_>) {
    let Good { key, elements, prefill, decode, list, .. } = good;
    let bf16 = [TensorDesc { dtype: DType::Bf16, ..key[0] }];
    broken.by("key.dtype_of_query", FiaCall { key: &bf16, value: &bf16, ..prefill.clone() });
    broken.by("key.rank", FiaCall { key: &[half(&[2, 64, 128])], ..prefill.clone() });
    broken.by("key.batch", FiaCall { key: &elements[..1], value: &elements[..1], ..prefill.clone() });
    let huge = [half(&[65_537, 4, 64, 32])];
    broken.by(
        "query.batch_max",
        FiaCall {
            query: Some(half(&[65_537, 8, 1, 32])),
            attention_out: Some(half(&[65_537, 8, 1, 32])),
            key: &huge,
            value: &huge,
            ..decode.clone()
        },
    );
    broken.by("value.shape_of_key", FiaCall { value: &[half(&[2, 4, 63, 32])], ..decode.clone() });
    broken.by("key.list_length", FiaCall { key: &elements[..1], value: &elements[..1], ..decode.clone() });
    let batched = [half(&[1, 4, 64, 32]), half(&[2, 4, 64, 32])];
    broken.by("key.list_batch", FiaCall { key: &batched, value: &batched, ..list.clone() });
    let mixed = [half(&[1, 4, 64, 32]), half(&[1, 4, 64, 16])];
    broken.by("key.list_shape", FiaCall { key: &mixed, value: &mixed, ..list.clone() });
    broken.by("value.shape_of_key", FiaCall { value: &[elements[1], elements[0]], ..list.clone() });
}
