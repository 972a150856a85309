//! The platform that executed the calls of a command, for its first line and its JSON.

use std::fmt;

use ascend_attention::spec::Cann;
use ascend_attention::{Platform, Stream};
use serde_json::{Map, Value, json};

/// An NPU, or the emulation under the name of a chip.
pub(super) struct DeviceReport {
    pub(super) platform: Platform,
    pub(super) soc: String,
    cann: Option<Cann>,
    origin: String,
}

impl DeviceReport {
    pub(super) fn of(stream: &Stream) -> Self {
        let device = stream.device();
        let runtime = device.runtime();
        Self {
            platform: runtime.platform(),
            soc: device.soc_name().to_owned(),
            cann: device.target().ok().map(|target| target.cann),
            origin: runtime.origin().to_string(),
        }
    }

    /// The platform's fields in a command's last or only JSON object.
    pub(super) fn json(&self) -> Map<String, Value> {
        let fields = [
            ("platform", json!(self.platform.to_string())),
            ("soc", json!(self.soc)),
            ("cann", json!(self.cann.map(Cann::name))),
        ];
        fields.map(|(name, value)| (name.to_owned(), value)).into_iter().collect()
    }

    /// A command's last JSON object: sums, and the platform that computed them.
    pub(super) fn summary(&self, mut sums: Value) -> Value {
        if let Value::Object(sums) = &mut sums {
            sums.extend(self.json());
        }
        json!({ "summary": sums })
    }
}

/// The first line of a command.
impl fmt::Display for DeviceReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "platform {}, {}", self.platform, self.soc)?;
        if let Some(cann) = self.cann {
            write!(f, " with CANN {cann}")?;
        }
        write!(f, ": {}", self.origin)
    }
}
