//! ScatterPaKvCache.

use super::executor_of;
use crate::descriptor::Described;
use crate::executor::launch;
use crate::op::scatter::ScatterOperator;
use crate::runtime::context;
use crate::status::aclnn;
use ascend_spec::scatter::Arguments;
use ascend_spec::{OperatorVersion, Refusal, arguments_of_version, scatter_pa_kv_cache_arguments};
use ascend_sys::bindings::{aclOpExecutor, aclnnStatus, aclrtStream};
use std::ffi::c_void;

fn new(arguments: &Arguments<Described>) -> Result<ScatterOperator, Refusal> {
    let descs = arguments.map(|_, tensor| tensor.desc);
    ScatterOperator::new(descs, context::machine().target.soc)
}

scatter_pa_kv_cache_arguments! { arguments_of_version {
    1 phase_one { aclnnScatterPaKvCacheGetWorkspaceSize, Arguments, executor_of(new) }
} }
phase_two!(
    aclnnScatterPaKvCache,
    OperatorVersion::ScatterPaKvCache.symbol()
);
