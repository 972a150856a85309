//! A launch costs the calling thread no heap allocation once it has happened before.

use crate::allocations::allocations;
use crate::bench::*;
use ascend_emu::abi::*;

pub(crate) fn launches_addresses_and_events_allocate_nothing() {
    let _bench = Bench::new();
    let (one, two, event) = (stream(), stream(), event());
    let (call, other) = (Call::new(1), Call::new(9));
    let executor = call.prepare();
    ok(unsafe { aclSetAclOpExecutorRepeatable(executor) });
    let step = |from: &Call| unsafe {
        ok(aclSetInputTensorAddr(executor, 0, call.tensors[0], from.q));
        ok(aclSetDynamicInputTensorAddr(executor, 1, 0, call.key, from.k));
        ok(aclSetDynamicInputTensorAddr(executor, 2, 0, call.value, from.v));
        ok(aclSetOutputTensorAddr(executor, 0, call.tensors[1], from.out));
        ok(aclSetOutputTensorAddr(executor, 1, call.tensors[2], from.lse));
        ok(call.launch(executor, one));
        ok(aclrtRecordEvent(event, one));
        ok(aclrtStreamWaitEvent(two, event));
        ok(aclrtRecordEvent(event, two));
        ok(aclrtStreamWaitEvent(one, event));
    };
    for _ in 0..4 {
        step(&call);
        step(&other);
    }
    sync(one);
    sync(two);
    let before = allocations();
    for _ in 0..50 {
        step(&call);
        step(&other);
    }
    let after = allocations();
    sync(one);
    sync(two);
    assert_eq!(after - before, 0);
    call.check(1);
    unsafe {
        ok(aclDestroyAclOpExecutor(executor));
        ok(aclrtDestroyEvent(event));
    }
    destroy(one);
    destroy(two);
    other.check(9);
    call.destroy();
    other.destroy();
}
