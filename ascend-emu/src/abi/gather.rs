//! GatherPaKvCache.

use super::executor_of;
use crate::descriptor::Described;
use crate::executor::launch;
use crate::op::gather::GatherOperator;
use crate::runtime::context;
use crate::status::aclnn;
use ascend_spec::ops::gather_pa_kv_cache::Arguments;
use ascend_spec::{OperatorVersion, Refusal, arguments_of_version, gather_pa_kv_cache_arguments};
use ascend_sys::bindings::{aclOpExecutor, aclnnStatus, aclrtStream};
use std::ffi::c_void;

fn new(arguments: &Arguments<Described>) -> Result<GatherOperator, Refusal> {
    let descs = arguments.map(|_, tensor| tensor.desc);
    GatherOperator::new(descs, context::machine().target.soc)
}

gather_pa_kv_cache_arguments! { arguments_of_version {
    1 phase_one { aclnnGatherPaKvCacheGetWorkspaceSize, Arguments, executor_of(new) }
} }
phase_two!(
    aclnnGatherPaKvCache,
    OperatorVersion::GatherPaKvCache.symbol()
);
