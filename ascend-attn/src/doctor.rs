//! `ascend-attn doctor`: what this machine has to run attention on.

use std::ffi::OsStr;
use std::process::ExitCode;

use ascend_attention::spec::ops::fused_infer_attention_score::Version;
use ascend_attention::sys::{self, Attempt, Origin, UnknownVariable};
use ascend_attention::{Error, Installed, Runtime};
use clap::ValueEnum;
use serde_json::{Value, json};

use super::Stop;
use super::installation::{self, Folder};
use super::output::{self, Output};

/// What is wrong where a folder that `xtask emu-libs` made is found in the place of CANN.
const IS_EMULATION: &str = "the libraries that were found as CANN's are the CPU emulation, laid out as a toolkit";

/// The page of the book that lists all variables.
const VARIABLES_PAGE: &str = "docs/src/environment.md";

/// Report what was found of CANN on this machine, which platform would be used, and what to set
///
/// Looks at the toolkit, the driver, the libraries (every path tried, and why not), the devices and the versions of
/// the operator that the installed CANN has, and at the variables that are not read, which are often misspelt.
/// Changes nothing, and works on machines without an NPU; the exit code is 0 whatever is found, unless --require asks
/// for a platform.
#[derive(clap::Args)]
pub(super) struct Arguments {
    /// End with exit code 1 unless this platform can run attention here
    #[arg(long, value_enum, value_name = "PLATFORM")]
    require: Option<Required>,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// A platform that a caller requires.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Required {
    /// An NPU with a CANN release that has the operator
    Npu,
    /// The emulation on the CPU
    Emulated,
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
    let lacks = arguments.require.and_then(|required| findings.lacks(required));
    if let Some(lacks) = &lacks {
        output::complain(lacks);
    }
    Ok(ExitCode::from(u8::from(lacks.is_some())))
}

struct Findings {
    variables: Vec<(&'static str, Option<String>)>,
    unknown: Vec<UnknownVariable>,
    toolkits: Vec<Folder>,
    driver: Folder,
    device_files: Vec<String>,
    /// Every path tried for a library, and its outcome.
    attempts: Vec<Attempt>,
    npu: Result<Usable, Error>,
    emulation: Result<Usable, Error>,
    auto: Result<String, Error>,
}

/// A platform that can be used.
struct Usable {
    origin: String,
    acl_version: Result<String, Error>,
    devices: Result<usize, Error>,
    /// Name of the chip of device 0.
    soc: Result<String, Error>,
    /// The release by whose contract calls are checked, and why.
    contract: Installed,
    /// Versions of the operator whose two functions are available.
    operator: Vec<Version>,
    /// The libraries that calls between ranks come from, or that they lack.
    hccl: Result<String, String>,
}

impl Usable {
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
            hccl: hccl(api),
        }
    }

    fn has_device(&self) -> bool {
        matches!(self.devices, Ok(1..)) && self.soc.is_ok()
    }

    fn operator(&self) -> String {
        let names: Vec<String> = self.operator.iter().map(Version::to_string).collect();
        if names.is_empty() { "none".to_owned() } else { names.join(" ") }
    }

    fn text(&self, lines: &mut Vec<String>) {
        lines.push(format!("  functions   {}", self.origin));
        lines.push(format!("  ACL version {}", shown(&self.acl_version)));
        lines.push(format!("  devices     {}", shown(&self.devices)));
        lines.push(format!("  chip        {}", shown(&self.soc)));
        lines.push(format!("  contract    {}", self.contract));
        lines.push(format!("  aclnnFusedInferAttentionScore versions {}", self.operator()));
        match &self.hccl {
            Ok(found) => lines.push(format!("  HCCL        {found}")),
            Err(lacks) => lines.push(format!("  HCCL        none: {lacks}")),
        }
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
            "hccl": match &self.hccl {
                Ok(found) => json!(found),
                Err(lacks) => json!({ "error": lacks }),
            },
        })
    }
}

/// Where the calls between ranks come from: a library for communicators, and one for what is exchanged; or the first
/// function that is missing.
fn hccl(api: &sys::Api) -> Result<String, String> {
    for function in ["HcclCommInitRootInfo", "HcclAllGather", "HcclAlltoAll"] {
        if !api.has(function) {
            return Err(format!("{function} is missing; calls between ranks need libhccl.so of CANN"));
        }
    }
    let libraries = api.origin().libraries().filter(|(file, _)| file.contains("hccl") || file.contains("hcomm"));
    let found: Vec<String> = libraries.map(|(_, path)| path.display().to_string()).collect();
    Ok(match found.as_slice() {
        [] => api.origin().to_string(),
        found => found.join(", "),
    })
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
            unknown: sys::unknown_variables(),
            toolkits: installation::toolkits(),
            driver: installation::driver(),
            device_files: installation::device_files(),
            attempts,
            npu: npu.map(|runtime| Usable::of(&runtime)),
            emulation: Runtime::emulated().map(|runtime| Usable::of(&runtime)),
            auto: Runtime::auto().map(|runtime| runtime.platform().to_string()),
        }
    }

    /// Whether CANN's libraries, as they were found, are the emulation laid out as a toolkit.
    fn npu_is_emulation(&self) -> bool {
        let opened = self.attempts.iter().filter(|attempt| attempt.outcome == sys::Outcome::Opened);
        let mut files = opened.filter_map(|attempt| attempt.path.canonicalize().ok());
        files.any(|file| file.file_name() == Some(OsStr::new("libascend_emu.so")))
    }

    /// Why a platform cannot run attention here, if it cannot.
    fn lacks(&self, required: Required) -> Option<String> {
        let (name, platform) = match required {
            Required::Npu => ("npu", &self.npu),
            Required::Emulated => ("emulated", &self.emulation),
        };
        let why = match platform {
            Err(error) => brief(error),
            Ok(_) if required == Required::Npu && self.npu_is_emulation() => IS_EMULATION.to_owned(),
            Ok(found) if !found.has_device() => "there is no usable device".to_owned(),
            Ok(found) if found.operator.is_empty() => "the operator has no version there".to_owned(),
            Ok(_) => return None,
        };
        Some(format!("--require {name}: {why}"))
    }

    /// Why `auto` chooses its platform.
    fn reason(&self) -> String {
        let variable = |name| {
            let found = self.variables.iter().find(|(known, _)| *known == name);
            found.and_then(|(_, value)| value.as_deref())
        };
        match variable("ASCEND_PLATFORM") {
            Some(value) if value != "auto" => return format!("ASCEND_PLATFORM={value}"),
            _ => {}
        }
        match &self.npu {
            Ok(_) if self.npu_is_emulation() => IS_EMULATION.to_owned(),
            Ok(npu) if npu.has_device() => "CANN's libraries are loaded and see a device".to_owned(),
            Ok(_) => "CANN's libraries are loaded, but there is no usable device".to_owned(),
            Err(Error::Load(error)) if error.is_absent() => "CANN's libraries are not installed".to_owned(),
            Err(Error::Load(_)) => "CANN's libraries are there, but cannot be loaded".to_owned(),
            Err(error) => format!("CANN cannot be used: {error}"),
        }
    }

    /// What to do for calls to run on an NPU.
    fn advice(&self) -> Vec<String> {
        let mut advice = Vec::new();
        let installed = self.toolkits.iter().find(|folder| folder.exists && folder.path.join("lib64").is_dir());
        match (&self.npu, installed) {
            (Ok(_), _) if self.npu_is_emulation() => advice.push(
                "to use an NPU, start a shell without the emulation's set_env.sh, LD_LIBRARY_PATH and ASCEND_HOME_PATH"
                    .to_owned(),
            ),
            (Ok(npu), _) if npu.has_device() && npu.operator.is_empty() => {
                advice.push("install a CANN release with aclnnFusedInferAttentionScore (8.1 or newer)".to_owned())
            }
            (Ok(npu), _) if npu.has_device() => {}
            (Ok(_), _) => advice.push(
                "install the driver and firmware of the NPU; in a container, pass its /dev/davinci* \
                 files, /dev/davinci_manager, /dev/devmm_svm and /dev/hisi_hdc, and let \
                 ASCEND_RT_VISIBLE_DEVICES name no other devices"
                    .to_owned(),
            ),
            (Err(Error::Load(error)), Some(folder)) if error.is_absent() => {
                advice.push(format!("source the set_env.sh of {0}, or set ASCEND_HOME_PATH={0}", folder.path.display()))
            }
            (Err(Error::Load(error)), _) if error.is_absent() => advice.push(
                "to use an NPU, install the CANN toolkit and source its set_env.sh, or set \
                 ASCEND_HOME_PATH to its folder"
                    .to_owned(),
            ),
            (Err(Error::Load(error)), _) if error.lacks_driver() => advice.push(
                "install the driver of the NPU, or add the folder of its libraries to LD_LIBRARY_PATH".to_owned(),
            ),
            (Err(_), _) => advice.push(
                "source the set_env.sh of one complete CANN installation, so that all libraries are of \
                 the same release"
                    .to_owned(),
            ),
        }
        if self.auto.is_err() {
            advice.push(match &self.emulation {
                Ok(_) => "set ASCEND_PLATFORM=emulated to run on the CPU meanwhile".to_owned(),
                Err(Error::NoEmulation) => "build with the feature `emulation` to run on the CPU meanwhile".to_owned(),
                Err(error) => format!("fix what keeps the emulation from starting: {}", brief(error)),
            });
        }
        for unknown in self.unknown.iter().filter(|unknown| unknown.is_misspelt()) {
            advice.push(match unknown.meant {
                Some(meant) => format!("set {meant} in the place of {}", unknown.name.escape_debug()),
                None => format!("unset {}, or spell it as {VARIABLES_PAGE} does", unknown.name.escape_debug()),
            });
        }
        advice
    }

    fn text(&self) -> Vec<String> {
        let mut lines =
            vec![format!("ascend-attn {}", env!("CARGO_PKG_VERSION")), String::new(), "environment".to_owned()];
        for (name, value) in &self.variables {
            let value = value.as_deref().unwrap_or("not set");
            lines.push(format!("  {name} {value}"));
        }
        lines.extend(self.unknown.iter().map(|unknown| format!("  {unknown}")));
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
                    let emulated = title == "NPU" && self.npu_is_emulation();
                    lines.push(format!("{title}: available{}", if emulated { ", but emulated" } else { "" }));
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
            Ok(platform) => platform.clone(),
            Err(error) => format!("error: {}", brief(error)),
        };
        lines.push(format!("platform auto: {auto} ({})", self.reason()));
        lines.extend(self.advice().iter().map(|advice| format!("to do: {advice}")));
        lines
    }

    fn json(&self) -> Value {
        let platform = |platform: &Result<Usable, Error>| match platform {
            Ok(platform) => platform.json(),
            Err(error) => json!({ "error": brief(error) }),
        };
        let variables: serde_json::Map<String, Value> =
            self.variables.iter().map(|(name, value)| ((*name).to_owned(), json!(value))).collect();
        let unknown = |variable: &UnknownVariable| json!({ "name": variable.name, "meant": variable.meant });
        json!({
            "version": env!("CARGO_PKG_VERSION"),
            "environment": variables,
            "unknown_variables": self.unknown.iter().map(unknown).collect::<Vec<_>>(),
            "toolkits": self.toolkits.iter().map(folder_json).collect::<Vec<_>>(),
            "driver": folder_json(&self.driver),
            "device_files": self.device_files,
            "libraries": self.attempts.iter().map(attempt_json).collect::<Vec<_>>(),
            "npu": platform(&self.npu),
            "emulation": platform(&self.emulation),
            "auto": {
                "platform": self.auto.as_ref().ok(),
                "error": self.auto.as_ref().err().map(brief),
                "reason": self.reason(),
            },
            "advice": self.advice(),
        })
    }
}

/// An error without the list of paths, which the report has elsewhere.
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
