//! Reuse of executors.

use crate::executor::EXECUTORS;
use crate::status::{Outcome, aclnn};
use ascend_sys::bindings::{aclOpExecutor, aclTensor, aclTensorList, aclnnStatus};
use std::ffi::c_void;

pub unsafe extern "C" fn aclSetAclOpExecutorRepeatable(executor: *mut aclOpExecutor) -> aclnnStatus {
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
    aclnn(|| EXECUTORS.get(executor)?.set_input("aclSetInputTensorAddr", index, tensor.cast(), addr.addr()))
}

pub unsafe extern "C" fn aclSetOutputTensorAddr(
    executor: *mut aclOpExecutor,
    index: usize,
    tensor: *mut aclTensor,
    addr: *mut c_void,
) -> aclnnStatus {
    aclnn(|| EXECUTORS.get(executor)?.set_output("aclSetOutputTensorAddr", index, tensor.cast(), addr.addr()))
}

pub unsafe extern "C" fn aclSetTensorAddr(
    executor: *mut aclOpExecutor,
    index: usize,
    tensor: *mut aclTensor,
    addr: *mut c_void,
) -> aclnnStatus {
    aclnn(|| EXECUTORS.get(executor)?.set_any("aclSetTensorAddr", index, tensor.cast(), addr.addr()))
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

/// Defines functions that have a second name.
macro_rules! aliases {
    ($($alias:ident = $function:ident ( $($argument:ident: $type:ty),* );)*) => {$(
        pub unsafe extern "C" fn $alias($($argument: $type),*) -> aclnnStatus {
            // SAFETY: the caller's promise is that of the function.
            unsafe { $function($($argument),*) }
        }
    )*};
}

aliases! {
    AclSetInputTensorAddr = aclSetInputTensorAddr(
        executor: *mut aclOpExecutor, index: usize, tensor: *mut aclTensor, addr: *mut c_void
    );
    AclSetOutputTensorAddr = aclSetOutputTensorAddr(
        executor: *mut aclOpExecutor, index: usize, tensor: *mut aclTensor, addr: *mut c_void
    );
    AclSetTensorAddr = aclSetTensorAddr(
        executor: *mut aclOpExecutor, index: usize, tensor: *mut aclTensor, addr: *mut c_void
    );
    AclSetDynamicInputTensorAddr = aclSetDynamicInputTensorAddr(
        executor: *mut aclOpExecutor, irIndex: usize, relativeIndex: usize, tensors: *mut aclTensorList,
        addr: *mut c_void
    );
    AclSetDynamicOutputTensorAddr = aclSetDynamicOutputTensorAddr(
        executor: *mut aclOpExecutor, irIndex: usize, relativeIndex: usize, tensors: *mut aclTensorList,
        addr: *mut c_void
    );
    AclSetDynamicTensorAddr = aclSetDynamicTensorAddr(
        executor: *mut aclOpExecutor, irIndex: usize, relativeIndex: usize, tensors: *mut aclTensorList,
        addr: *mut c_void
    );
}
