//! The platform that executes the calls of a command: how it is chosen, and what the first line and the JSON say of it.

use std::fmt;

use ascend_attention::spec::Cann;
use ascend_attention::{Platform, Result, Runtime, Stream};
use clap::ValueEnum;
use serde_json::{Map, Value, json};

/// The arguments of a command that executes calls.
#[derive(clap::Args)]
pub(super) struct DeviceChoice {
    /// What executes the calls
    #[arg(long, value_enum, default_value_t)]
    platform: PlatformChoice,
    /// Number of the device
    #[arg(
        long,
        value_name = "ID",
        default_value_t = 0,
        allow_negative_numbers = true,
        value_parser = clap::value_parser!(i32).range(0..)
    )]
    device: i32,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
enum PlatformChoice {
    /// An NPU if there is one, else the emulation; the variable ASCEND_PLATFORM overrides
    #[default]
    Auto,
    /// The emulation on the CPU
    Emulated,
    /// An NPU, through CANN's libraries
    Npu,
}

impl DeviceChoice {
    /// The runtime of the platform.
    pub(super) fn runtime(&self) -> Result<Runtime> {
        match self.platform {
            PlatformChoice::Auto => Runtime::auto(),
            PlatformChoice::Emulated => Runtime::emulated(),
            PlatformChoice::Npu => Runtime::npu(),
        }
    }

    /// The number of the device.
    pub(super) fn number(&self) -> i32 {
        self.device
    }

    /// A new stream of the device.
    pub(super) fn stream(&self) -> Result<Stream> {
        self.runtime()?.device(self.device)?.stream()
    }
}

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
