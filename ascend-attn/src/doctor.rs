//! `ascend-attn doctor`: what this machine has to run attention on.

use std::process::ExitCode;

use ascend_attention::spec::fia::Version;
use ascend_attention::sys::{self, Attempt, Origin};
use ascend_attention::{Error, Installed, Runtime};
use serde_json::{Value, json};

use super::Stop;
use super::installation::{self, Folder};
use super::output::Output;

/// Report what was found of CANN on this machine, which backend would be used, and what to set
///
/// Looks at the toolkit, the driver, the libraries (every path tried, and why not), the devices and the versions of the
/// operator that the installed CANN has. Changes nothing, and works on machines without an NPU; the exit code is 0
/// whatever is found.
#[derive(clap::Args)]
pub(super) struct Arguments {
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

pub(super) fn run(arguments: &Arguments, output: &mut Output) -> Result<ExitCode, Stop> {
    let findings = Findings::gather();
    if arguments.json {
        output.line(findings.json())?;
    } else {
        for line in findings.text() {
            output.line(line)?;
        }
    }
    Ok(ExitCode::SUCCESS)
}

struct Findings {
    variables: Vec<(String, Option<String>)>,
    toolkits: Vec<Folder>,
    driver: Folder,
    device_files: Vec<String>,
    /// Every path tried for a library, and what came of it.
    attempts: Vec<Attempt>,
    npu: Result<Platform, Error>,
    emulation: Result<Platform, Error>,
    auto: Result<String, Error>,
}

/// A backend that works.
struct Platform {
    origin: String,
    acl_version: Result<String, Error>,
    devices: Result<usize, Error>,
    /// Name of the chip of device 0.
    soc: Result<String, Error>,
    /// The release whose contract calls are checked by, and why.
    contract: Installed,
    /// Versions of the operator whose two functions are there.
    operator: Vec<Version>,
}

impl Platform {
    fn of(runtime: &Runtime) -> Self {
        let devices = runtime.device_count();
        let soc = match &devices {
            Ok(0) => Ok("none".to_owned()),
            _ => runtime.device(0).map(|device| device.soc_name().to_owned()),
        };
        let api = runtime.api();
        let has = |version: &Version| {
            let symbol = version.symbol();
            api.has(symbol) && api.has(&format!("{symbol}GetWorkspaceSize"))
        };
        Self {
            origin: runtime.origin().to_string(),
            acl_version: runtime.version().map(|version| version.to_string()),
            devices,
            soc,
            contract: runtime.installed().clone(),
            operator: Version::ALL.into_iter().filter(has).collect(),
        }
    }

    fn has_device(&self) -> bool {
        matches!(self.devices, Ok(1..)) && self.soc.is_ok()
    }

    fn operator(&self) -> String {
        let names: Vec<String> = self.operator.iter().map(Version::to_string).collect();
        if names.is_empty() {
            "none".to_owned()
        } else {
            names.join(" ")
        }
    }

    fn text(&self, lines: &mut Vec<String>) {
        lines.push(format!("  functions   {}", self.origin));
        lines.push(format!("  ACL version {}", shown(&self.acl_version)));
        lines.push(format!("  devices     {}", shown(&self.devices)));
        lines.push(format!("  chip        {}", shown(&self.soc)));
        lines.push(format!("  contract    {}", self.contract));
        lines.push(format!(
            "  aclnnFusedInferAttentionScore versions {}",
            self.operator()
        ));
    }

    fn json(&self) -> Value {
        json!({
            "origin": self.origin,
            "acl_version": result(&self.acl_version),
            "devices": result(&self.devices),
            "soc": result(&self.soc),
            "contract": {
                "cann": self.contract.release.cann().name(),
                "installed": self.contract.version,
                "reason": self.contract.to_string(),
            },
            "operator_versions": self.operator.iter().map(Version::to_string).collect::<Vec<_>>(),
        })
    }
}

impl Findings {
    fn gather() -> Self {
        let npu = Runtime::npu();
        let attempts = match &npu {
            Ok(runtime) => match runtime.origin() {
                Origin::Loaded(attempts) => attempts.clone(),
                _ => Vec::new(),
            },
            Err(Error::Load(error)) => error.attempts.clone(),
            Err(_) => Vec::new(),
        };
        Self {
            variables: installation::variables(),
            toolkits: installation::toolkits(),
            driver: installation::driver(),
            device_files: installation::device_files(),
            attempts,
            npu: npu.map(|runtime| Platform::of(&runtime)),
            emulation: Runtime::emulated().map(|runtime| Platform::of(&runtime)),
            auto: Runtime::auto().map(|runtime| runtime.backend().to_string()),
        }
    }

    /// Why `auto` chooses what it chooses.
    fn reason(&self) -> String {
        let variable = |name| {
            let found = self.variables.iter().find(|(known, _)| known == name);
            found.and_then(|(_, value)| value.as_deref())
        };
        match variable("ASCEND_BACKEND") {
            Some(value) if value != "auto" => return format!("ASCEND_BACKEND={value}"),
            _ => {}
        }
        match &self.npu {
            Ok(npu) if npu.has_device() => {
                "CANN's libraries are loaded and see a device".to_owned()
            }
            Ok(_) => "CANN's libraries are loaded, but there is no usable device".to_owned(),
            Err(Error::Load(error)) if error.is_absent() => {
                "CANN's libraries are not installed".to_owned()
            }
            Err(Error::Load(_)) => "CANN's libraries are there, but cannot be loaded".to_owned(),
            Err(error) => format!("CANN cannot be used: {error}"),
        }
    }

    /// What to do for calls to run on an NPU.
    fn advice(&self) -> Vec<String> {
        let mut advice = Vec::new();
        let installed = self
            .toolkits
            .iter()
            .find(|folder| folder.exists && folder.path.join("lib64").is_dir());
        match (&self.npu, installed) {
            (Ok(npu), _) if npu.has_device() && npu.operator.is_empty() => advice.push(
                "install a CANN release with aclnnFusedInferAttentionScore (8.1 or newer)".to_owned(),
            ),
            (Ok(npu), _) if npu.has_device() => {}
            (Ok(_), _) => advice.push(
                "install the driver and firmware of the NPU; in a container, pass its /dev/davinci* \
                 files, /dev/davinci_manager, /dev/devmm_svm and /dev/hisi_hdc, and let \
                 ASCEND_RT_VISIBLE_DEVICES name no other devices"
                    .to_owned(),
            ),
            (Err(Error::Load(error)), Some(folder)) if error.is_absent() => advice.push(format!(
                "source the set_env.sh of {0}, or set ASCEND_HOME_PATH={0}",
                folder.path.display()
            )),
            (Err(Error::Load(error)), _) if error.is_absent() => advice.push(
                "to use an NPU, install the CANN toolkit and source its set_env.sh, or set \
                 ASCEND_HOME_PATH to its folder"
                    .to_owned(),
            ),
            (Err(Error::Load(error)), _) if error.lacks_driver() => advice.push(
                "install the driver of the NPU, or add the folder of its libraries to LD_LIBRARY_PATH"
                    .to_owned(),
            ),
            (Err(_), _) => advice.push(
                "source the set_env.sh of one complete CANN installation, so that all libraries are of \
                 the same release"
                    .to_owned(),
            ),
        }
        if self.auto.is_err() {
            advice.push(match self.emulation {
                Ok(_) => "set ASCEND_BACKEND=emulated to run on the CPU meanwhile".to_owned(),
                Err(Error::NoEmulation) => {
                    "build with the feature `emulation` to run on the CPU meanwhile".to_owned()
                }
                Err(ref error) => format!(
                    "mend what keeps the emulation from running on the CPU meanwhile: {}",
                    brief(error)
                ),
            });
        }
        advice
    }

    fn text(&self) -> Vec<String> {
        let mut lines = vec![
            format!("ascend-attn {}", env!("CARGO_PKG_VERSION")),
            String::new(),
            "environment".to_owned(),
        ];
        for (name, value) in &self.variables {
            let value = value.as_deref().unwrap_or("not set");
            lines.push(format!("  {name} {value}"));
        }
        lines.push(String::new());
        lines.push("toolkit".to_owned());
        lines.extend(self.toolkits.iter().map(folder_text));
        lines.push(String::new());
        lines.push("driver".to_owned());
        lines.push(folder_text(&self.driver));
        lines.push(match self.device_files.as_slice() {
            [] => "  no /dev/davinci* files".to_owned(),
            files => format!("  {}", files.join(" ")),
        });
        lines.push(String::new());
        lines.push("libraries".to_owned());
        lines.extend(self.attempts.iter().map(|attempt| format!("  {attempt}")));
        if self.attempts.is_empty() {
            lines.push("  none were opened at run time".to_owned());
        }
        for (title, platform) in [("NPU", &self.npu), ("emulation", &self.emulation)] {
            lines.push(String::new());
            match platform {
                Ok(platform) => {
                    lines.push(format!("{title}: available"));
                    platform.text(&mut lines);
                }
                Err(error) => {
                    lines.push(format!("{title}: not available"));
                    lines.push(format!("  {}", brief(error)));
                }
            }
        }
        lines.push(String::new());
        let auto = match &self.auto {
            Ok(backend) => backend.clone(),
            Err(error) => format!("error: {}", brief(error)),
        };
        lines.push(format!("backend auto: {auto} ({})", self.reason()));
        lines.extend(
            self.advice()
                .iter()
                .map(|advice| format!("to do: {advice}")),
        );
        lines
    }

    fn json(&self) -> Value {
        let platform = |platform: &Result<Platform, Error>| match platform {
            Ok(platform) => platform.json(),
            Err(error) => json!({ "error": brief(error) }),
        };
        let variables: serde_json::Map<String, Value> = self
            .variables
            .iter()
            .map(|(name, value)| (name.clone(), json!(value)))
            .collect();
        json!({
            "version": env!("CARGO_PKG_VERSION"),
            "environment": variables,
            "toolkits": self.toolkits.iter().map(folder_json).collect::<Vec<_>>(),
            "driver": folder_json(&self.driver),
            "device_files": self.device_files,
            "libraries": self.attempts.iter().map(attempt_json).collect::<Vec<_>>(),
            "npu": platform(&self.npu),
            "emulation": platform(&self.emulation),
            "auto": {
                "backend": self.auto.as_ref().ok(),
                "error": self.auto.as_ref().err().map(brief),
                "reason": self.reason(),
            },
            "advice": self.advice(),
        })
    }
}

/// An error without the list of paths, which stands elsewhere in the report.
fn brief(error: &Error) -> String {
    let text = error.to_string();
    text.lines().next().unwrap_or_default().to_owned()
}

fn shown<T: ToString>(value: &Result<T, Error>) -> String {
    match value {
        Ok(value) => value.to_string(),
        Err(error) => brief(error),
    }
}

fn result<T: Into<Value> + Clone>(value: &Result<T, Error>) -> Value {
    match value {
        Ok(value) => value.clone().into(),
        Err(error) => json!({ "error": brief(error) }),
    }
}

fn folder_text(folder: &Folder) -> String {
    let found = match (&folder.version, folder.exists) {
        (Some((version, file)), _) => format!("version {version} ({})", file.display()),
        (None, true) => "there, but no file states its version".to_owned(),
        (None, false) => "not there".to_owned(),
    };
    format!("  {} [{}]: {found}", folder.path.display(), folder.source)
}

fn folder_json(folder: &Folder) -> Value {
    json!({
        "path": folder.path.to_string_lossy(),
        "source": folder.source,
        "exists": folder.exists,
        "version": folder.version.as_ref().map(|(version, _)| version),
    })
}

fn attempt_json(attempt: &Attempt) -> Value {
    json!({
        "file": attempt.file,
        "path": attempt.path.to_string_lossy(),
        "outcome": match &attempt.outcome {
            sys::Outcome::Opened => "opened",
            sys::Outcome::Absent => "absent",
            sys::Outcome::Failed(text) => text,
        },
    })
}
