//! The attributes of a stream that programs set.

use super::Stream;
use crate::lock::Lock;
use crate::runtime::core_limits::CoreLimits;
use crate::status::{NOT_SUPPORTED, Outcome, PARAM_INVALID, failure};
use ascend_sys::bindings::{ACL_CONTINUE_ON_FAILURE, ACL_STOP_ON_FAILURE};
use std::sync::Arc;

/// The attributes and limits of a stream.
#[derive(Debug, Default)]
pub(crate) struct Settings {
    pub limits: Arc<Lock<CoreLimits>>,
    values: Lock<Values>,
}

/// Attributes that the emulator keeps and reports.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Values {
    /// From 0, the highest, to 7.
    pub priority: u32,
    /// `ACL_STREAM_*` flags of the stream's creation.
    pub flags: u32,
    /// Whether operators are to look for numbers out of range.
    pub overflow_switch: bool,
    /// Tag of the streams that look for numbers out of range together.
    pub tag: u32,
    /// Whether recorded work is to keep the descriptions of its operators.
    pub cache_op_info: bool,
    /// Whether nothing more is to be run once a task has failed.
    pub stop_on_failure: bool,
}

impl Settings {
    pub(crate) fn new(priority: u32, flags: u32) -> Self {
        Settings { limits: Arc::default(), values: Lock::new(Values { priority, flags, ..Values::default() }) }
    }

    pub(crate) fn values(&self) -> Values {
        *self.values.lock()
    }

    pub(crate) fn change(&self, with: impl FnOnce(&mut Values)) {
        with(&mut self.values.lock());
    }
}

impl Stream {
    /// `aclrtSetStreamFailureMode`.
    pub(crate) fn set_failure_mode(&self, name: &str, mode: u64) -> Outcome {
        let stop = match u32::try_from(mode) {
            Ok(ACL_CONTINUE_ON_FAILURE) => false,
            Ok(ACL_STOP_ON_FAILURE) => true,
            _ => {
                return Err(failure!(
                    PARAM_INVALID,
                    "{name}: mode: given {mode}, allowed: ACL_CONTINUE_ON_FAILURE (0), ACL_STOP_ON_FAILURE (1)"
                ));
            }
        };
        if !stop && self.settings.values().stop_on_failure {
            return Err(failure!(
                NOT_SUPPORTED,
                "{name}: a stream that stops at a failure cannot be told to go on; make another stream"
            ));
        }
        self.settings.change(|values| values.stop_on_failure |= stop);
        Ok(())
    }
}
