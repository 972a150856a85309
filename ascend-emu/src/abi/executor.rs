//! Reuse of executors.

use crate::executor::EXECUTORS;
use crate::status::{Outcome, aclnn};
use ascend_sys::bindings::{aclOpExecutor, aclTensor, aclTensorList, aclnnStatus};
use std::ffi::c_void;

pub unsafe extern "C" fn aclSetAclOpExecutorRepeatable(
    executor: *mut aclOpExecutor,
) -> aclnnStatus {
    aclnn(|| {
        EXECUTORS.get(executor)?.make_repeatable();
        Ok(())
    })
}

pub unsafe extern "C" fn aclDestroyAclOpExecutor(executor: *mut aclOpExecutor) -> aclnnStatus {
    aclnn(|| EXECUTORS.remove(executor).map(drop))
}

pub unsafe extern "C" fn aclSetInputTensorAddr(
    executor: *mut aclOpExecutor,
    index: usize,
    tensor: *mut aclTensor,
    addr: *mut c_void,
) -> aclnnStatus {
    aclnn(|| {
        EXECUTORS.get(executor)?.set_input(
            "aclSetInputTensorAddr",
            index,
            tensor.cast(),
            addr.addr(),
        )
    })
}

pub unsafe extern "C" fn aclSetOutputTensorAddr(
    executor: *mut aclOpExecutor,
    index: usize,
    tensor: *mut aclTensor,
    addr: *mut c_void,
) -> aclnnStatus {
    aclnn(|| {
        EXECUTORS.get(executor)?.set_output(
            "aclSetOutputTensorAddr",
            index,
            tensor.cast(),
            addr.addr(),
        )
    })
}

pub unsafe extern "C" fn aclSetTensorAddr(
    executor: *mut aclOpExecutor,
    index: usize,
    tensor: *mut aclTensor,
    addr: *mut c_void,
) -> aclnnStatus {
    aclnn(|| {
        EXECUTORS
            .get(executor)?
            .set_any("aclSetTensorAddr", index, tensor.cast(), addr.addr())
    })
}

pub unsafe extern "C" fn aclSetDynamicInputTensorAddr(
    executor: *mut aclOpExecutor,
    irIndex: usize,
    relativeIndex: usize,
    tensors: *mut aclTensorList,
    addr: *mut c_void,
) -> aclnnStatus {
    aclnn(|| {
        EXECUTORS.get(executor)?.set_element(
            "aclSetDynamicInputTensorAddr",
            irIndex,
            relativeIndex,
            tensors.cast(),
            addr.addr(),
        )
    })
}

pub unsafe extern "C" fn aclSetDynamicOutputTensorAddr(
    executor: *mut aclOpExecutor,
    irIndex: usize,
    _relativeIndex: usize,
    _tensors: *mut aclTensorList,
    _addr: *mut c_void,
) -> aclnnStatus {
    aclnn(|| {
        let executor = EXECUTORS.get(executor)?;
        Err(executor.refuse_output_list("aclSetDynamicOutputTensorAddr", irIndex))
    })
}

pub unsafe extern "C" fn aclSetDynamicTensorAddr(
    executor: *mut aclOpExecutor,
    irIndex: usize,
    relativeIndex: usize,
    tensors: *mut aclTensorList,
    addr: *mut c_void,
) -> aclnnStatus {
    const NAME: &str = "aclSetDynamicTensorAddr";
    aclnn(|| -> Outcome {
        let executor = EXECUTORS.get(executor)?;
        if executor.is_output(irIndex) {
            return Err(executor.refuse_output_list(NAME, irIndex));
        }
        executor.set_element(NAME, irIndex, relativeIndex, tensors.cast(), addr.addr())
    })
}

pub unsafe extern "C" fn AclSetInputTensorAddr(
    executor: *mut aclOpExecutor,
    index: usize,
    tensor: *mut aclTensor,
    addr: *mut c_void,
) -> aclnnStatus {
    // SAFETY: an alias.
    unsafe { aclSetInputTensorAddr(executor, index, tensor, addr) }
}

pub unsafe extern "C" fn AclSetOutputTensorAddr(
    executor: *mut aclOpExecutor,
    index: usize,
    tensor: *mut aclTensor,
    addr: *mut c_void,
) -> aclnnStatus {
    // SAFETY: an alias.
    unsafe { aclSetOutputTensorAddr(executor, index, tensor, addr) }
}

pub unsafe extern "C" fn AclSetTensorAddr(
    executor: *mut aclOpExecutor,
    index: usize,
    tensor: *mut aclTensor,
    addr: *mut c_void,
) -> aclnnStatus {
    // SAFETY: an alias.
    unsafe { aclSetTensorAddr(executor, index, tensor, addr) }
}

pub unsafe extern "C" fn AclSetDynamicInputTensorAddr(
    executor: *mut aclOpExecutor,
    irIndex: usize,
    relativeIndex: usize,
    tensors: *mut aclTensorList,
    addr: *mut c_void,
) -> aclnnStatus {
    // SAFETY: an alias.
    unsafe { aclSetDynamicInputTensorAddr(executor, irIndex, relativeIndex, tensors, addr) }
}

pub unsafe extern "C" fn AclSetDynamicOutputTensorAddr(
    executor: *mut aclOpExecutor,
    irIndex: usize,
    relativeIndex: usize,
    tensors: *mut aclTensorList,
    addr: *mut c_void,
) -> aclnnStatus {
    // SAFETY: an alias.
    unsafe { aclSetDynamicOutputTensorAddr(executor, irIndex, relativeIndex, tensors, addr) }
}

pub unsafe extern "C" fn AclSetDynamicTensorAddr(
    executor: *mut aclOpExecutor,
    irIndex: usize,
    relativeIndex: usize,
    tensors: *mut aclTensorList,
    addr: *mut c_void,
) -> aclnnStatus {
    // SAFETY: an alias.
    unsafe { aclSetDynamicTensorAddr(executor, irIndex, relativeIndex, tensors, addr) }
}
