//! The latest call that phase one refused is the process's, whatever thread launches.

use crate::bench::*;
use ascend_emu::abi::*;
use std::ptr::null_mut;

pub(crate) fn a_launch_without_an_executor_tells_what_phase_one_said() {
    let _bench = Bench::new();
    let call = Call::new(6);
    let (mut bytes, mut executor) = (0, null_mut());
    // A causal mode without its mask.
    fails(call.try_prepare(call.tensors[0], 3, &mut bytes, &mut executor), 561_002, &["atten_mask.required"]);
    let launch = || {
        fails(
            unsafe { aclnnFusedInferAttentionScore(null_mut(), 0, null_mut(), null_mut()) },
            561_103,
            &[
                "aclnnFusedInferAttentionScore: aclOpExecutor handle is null",
                "the latest phase one that gave none ended with 561002: atten_mask.required",
            ],
        )
    };
    launch();
    // Some callers launch on another thread.
    std::thread::scope(|scope| scope.spawn(launch).join()).unwrap();
    call.destroy();
}
