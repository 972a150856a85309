//! The same for Ascend 950, one letter a fact: 9.0 and 9.1 are judged alike.

mod features;
mod plain;
mod quantised;

use super::{Call, refusal, verdict};
use ascend_spec::ops::fused_infer_attention_score::FiaCall;
use ascend_spec::{Cann, Soc, Target, TensorDesc};

#[track_caller]
fn hold(facts: &[(&str, char, Call)]) {
    let mut wrong = Vec::new();
    for (about, letter, call) in facts {
        for cann in [Cann::V9_0, Cann::V9_1] {
            let target = Target::new(Soc::Ascend950, cann);
            if verdict(call, target) != Ok(*letter) {
                wrong.push(format!("{about} ({letter}): {}", refusal(call, target)));
                break;
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

fn masked(call: Call, sparse_mode: i64, atten_mask: Option<TensorDesc>) -> Call {
    FiaCall { sparse_mode, atten_mask, ..call }
}
