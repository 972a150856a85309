//! The two-phase protocol.

use crate::bench::*;
use ascend_emu::abi::*;
use ascend_sys::bindings::{aclDataType, aclOpExecutor};
use std::ptr::{null, null_mut};

#[test]
fn both_phases_compute_attention() {
    let _bench = Bench::new();
    let call = Call::new(1);
    assert!(call.is_poisoned());
    call.run(null_mut());
    sync(null_mut());
    call.check(1);
    call.destroy();
}

#[test]
fn an_ordinary_executor_is_used_up_by_phase_two() {
    let _bench = Bench::new();
    let call = Call::new(2);
    let stream = stream();
    let executor = call.prepare();
    ok(call.launch(executor, stream));
    fails(call.launch(executor, stream), 161_002, &["aclOpExecutor", "already used by phase two"]);
    fails(unsafe { aclDestroyAclOpExecutor(executor) }, 161_002, &["already used by phase two"]);
    sync(stream);
    call.check(2);
    destroy(stream);
    call.destroy();
}

#[test]
fn a_repeatable_executor_runs_again_with_other_addresses() {
    let _bench = Bench::new();
    let call = Call::new(3);
    let stream = stream();
    let executor = call.prepare();
    let other = malloc(S * D * 2);
    let second_key = upload(&numbers(11, S * D));
    unsafe {
        ok(aclSetAclOpExecutorRepeatable(executor));
        ok(call.launch(executor, stream));
        // The first launch keeps the addresses it was queued with.
        ok(aclSetOutputTensorAddr(executor, 0, call.tensors[1], other));
        let second_query = upload(&numbers(10, S * D));
        let second_value = upload(&numbers(12, S * D));
        ok(aclSetInputTensorAddr(executor, 0, call.tensors[0], second_query));
        ok(aclSetDynamicInputTensorAddr(executor, 1, 0, call.key, second_key));
        ok(AclSetDynamicTensorAddr(executor, 2, 0, call.value, second_value));
        sync(stream);
        call.check(3);
        ok(call.launch(executor, stream));
        sync(stream);
        call.check_at(10, other);
        // Inputs first, then outputs: V1 has 17 inputs.
        ok(aclSetTensorAddr(executor, 17, call.tensors[1], call.out));
        call.poison();
        ok(call.launch(executor, stream));
        sync(stream);
        call.check(10);
        ok(aclDestroyAclOpExecutor(executor));
        fails(aclDestroyAclOpExecutor(executor), 161_002, &["or destroyed"]);
        free(second_query);
        free(second_value);
    }
    free(second_key);
    free(other);
    destroy(stream);
    call.destroy();
}

#[test]
fn only_addresses_may_change() {
    let _bench = Bench::new();
    let call = Call::new(4);
    let executor = call.prepare();
    let wrong = tensor(aclDataType::ACL_BF16, &[1, 1, S as i64, D as i64], call.q);
    unsafe {
        fails(
            aclSetInputTensorAddr(executor, 0, wrong, call.q),
            161_002,
            &["aclSetInputTensorAddr", "only addresses may change"],
        );
        fails(aclSetInputTensorAddr(executor, 3, call.tensors[0], call.q), 161_002, &["without a tensor"]);
        fails(aclSetDynamicInputTensorAddr(executor, 1, 1, call.key, call.q), 161_002, &["without a tensor"]);
        fails(aclSetDynamicInputTensorAddr(executor, 0, 0, call.key, call.q), 161_002, &["no list"]);
        fails(
            aclSetInputTensorAddr(null_mut(), 0, call.tensors[0], call.q),
            561_103,
            &["aclOpExecutor handle is null"],
        );
        fails(aclSetInputTensorAddr(executor, 0, null_mut(), call.q), 161_001, &["tensor is null"]);
        fails(aclSetTensorAddr(executor, usize::MAX, call.tensors[0], call.q), 161_002, &["without a tensor"]);
        ok(aclDestroyAclOpExecutor(executor));
        ok(aclDestroyTensor(wrong));
    }
    call.destroy();
}

#[test]
fn a_wrong_workspace_is_refused_before_anything_is_queued() {
    let _bench = Bench::new();
    let call = Call::new(5);
    let executor = call.prepare();
    let bytes = call.workspace_bytes;
    let small = malloc(1 << 10);
    let mut pinned = null_mut();
    ok(unsafe { aclrtMallocHost(&mut pinned, bytes as usize) });
    let launch = |workspace, bytes| unsafe { aclnnFusedInferAttentionScore(workspace, bytes, executor, null_mut()) };
    fails(launch(call.workspace, bytes - 1), 161_002, &["workspaceSize"]);
    fails(launch(call.workspace, 0), 161_002, &["workspaceSize"]);
    fails(launch(null_mut(), bytes), 161_001, &["workspace is null"]);
    fails(launch(small, bytes), 161_002, &["1024 bytes left"]);
    fails(launch(pinned, bytes), 161_002, &["not device memory"]);
    fails(launch(nowhere(), bytes), 161_002, &["not device memory"]);
    sync(null_mut());
    assert!(call.is_poisoned());
    // The executor is still good.
    ok(launch(call.workspace, bytes));
    sync(null_mut());
    call.check(5);
    ok(unsafe { aclrtFreeHost(pinned) });
    free(small);
    call.destroy();
}

#[test]
fn phase_one_refuses_by_rule_and_leaves_no_executor() {
    let _bench = Bench::new();
    let call = Call::new(6);
    let mut bytes = 7;
    let mut executor: *mut aclOpExecutor = null_mut();
    fails(call.try_prepare(null(), 0, &mut bytes, &mut executor), 161_001, &["query"]);
    fails(call.try_prepare(call.tensors[0], 0, null_mut(), &mut executor), 161_001, &["workspaceSize is null"]);
    fails(call.try_prepare(call.tensors[0], 0, &mut bytes, null_mut()), 161_001, &["executor is null"]);
    // A causal mode without its mask.
    fails(call.try_prepare(call.tensors[0], 3, &mut bytes, &mut executor), 561_002, &["atten_mask.required"]);
    let wrong = tensor(aclDataType::ACL_FLOAT, &[1, 1, S as i64, D as i64], call.q);
    fails(call.try_prepare(wrong, 0, &mut bytes, &mut executor), 161_002, &["query"]);
    let stale = tensor(aclDataType::ACL_FLOAT16, &[1], call.q);
    ok(unsafe { aclDestroyTensor(stale) });
    fails(call.try_prepare(stale, 0, &mut bytes, &mut executor), 161_002, &["aclTensor", "already destroyed"]);
    assert!(executor.is_null());
    assert_eq!(bytes, 7);
    ok(unsafe { aclDestroyTensor(wrong) });
    // The device is as good as before.
    call.run(null_mut());
    sync(null_mut());
    call.check(6);
    call.destroy();
}

#[test]
fn phase_two_needs_an_executor_and_a_context() {
    let bench = Bench::new();
    let call = Call::new(7);
    fails(call.launch(null_mut(), null_mut()), 561_103, &["aclOpExecutor handle is null"]);
    let executor = call.prepare();
    let (context, at) = (bench.context.addr(), executor.addr());
    let (workspace, bytes) = (call.workspace.addr(), call.workspace_bytes);
    std::thread::spawn(move || {
        let pointer = std::ptr::without_provenance_mut;
        let launch = || unsafe {
            aclnnFusedInferAttentionScore(
                std::ptr::without_provenance_mut(workspace),
                bytes,
                std::ptr::without_provenance_mut(at),
                null_mut(),
            )
        };
        fails(launch(), 361_001, &["107002"]);
        ok(unsafe { aclrtSetCurrentContext(pointer(context)) });
        ok(launch());
        sync(null_mut());
    })
    .join()
    .unwrap();
    call.check(7);
    call.destroy();
}

#[test]
fn outputs_that_overlap_an_input_are_a_device_fault() {
    let _bench = Bench::new();
    let call = Call::new(8);
    let executor = call.prepare();
    ok(unsafe { aclSetOutputTensorAddr(executor, 0, call.tensors[1], call.q) });
    ok(call.launch(executor, null_mut()));
    fails(unsafe { aclrtSynchronizeStream(null_mut()) }, 507_015, &["attentionOut", "query", "overlap"]);
    call.run(null_mut());
    sync(null_mut());
    call.check(8);
    call.destroy();
}
