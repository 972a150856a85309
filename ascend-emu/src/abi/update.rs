//! AttentionUpdate.

use super::executor_of;
use crate::descriptor::Described;
use crate::executor::launch;
use crate::op::update::UpdateOperator;
use crate::runtime::context;
use crate::status::aclnn;
use ascend_spec::update::Arguments;
use ascend_spec::{OperatorVersion, Refusal, arguments_of_version, attention_update_arguments};
use ascend_sys::bindings::{aclOpExecutor, aclnnStatus, aclrtStream};
use std::ffi::c_void;

fn new(arguments: &Arguments<Described>) -> Result<UpdateOperator, Refusal> {
    let descs = arguments.map(|_, tensor| tensor.desc);
    UpdateOperator::new(descs, context::machine().target.soc)
}

attention_update_arguments! { arguments_of_version {
    1 phase_one { aclnnAttentionUpdateGetWorkspaceSize, Arguments, executor_of(new) }
} }
phase_two!(
    aclnnAttentionUpdate,
    OperatorVersion::AttentionUpdate.symbol()
);
