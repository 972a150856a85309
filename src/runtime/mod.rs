//! The process's connection to CANN or to its emulation, and what lives on a device.

mod allocation;
pub(crate) mod capturing;
mod context;
mod deferred_free;
mod device;
mod event;
mod machine;
mod queue;
mod release;
mod stream;
mod stream_mark;
mod stream_progress;

use std::collections::HashMap;
use std::env;
use std::fmt;
use std::ptr;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};

use ascend_sys::{Api, Origin, bindings as sys};
use once_cell::sync::OnceCell;

use crate::error::{Error, Result, acl, acl_error};
pub(crate) use allocation::Memory;
pub(crate) use context::Context;
pub(crate) use deferred_free::Resource;
use device::Shared;
pub use device::{Device, MemoryInfo};
pub use event::Event;
pub use machine::Machine;
pub use queue::Queue;
pub(crate) use queue::{CallOrder, LaunchQueue, ReplayCheck, ReplayedObject};
pub use release::{Installed, VersionSource, file_version, toolkit_version};
pub use stream::Stream;
pub use stream_mark::StreamMark;
pub(crate) use stream_progress::{StreamProgress, Uses, on_wait};

/// The variable that chooses the platform of [`Runtime::auto`].
pub const PLATFORM_VARIABLE: &str = "ASCEND_PLATFORM";

/// What executes the calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Platform {
    /// CANN's libraries, on an NPU.
    Npu,
    /// The emulation, on the CPU.
    Emulated,
    /// A function table that the program provides.
    Custom,
}

impl fmt::Display for Platform {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Npu => "npu",
            Self::Emulated => "emulated",
            Self::Custom => "custom",
        })
    }
}

/// Version of the runtime interface (not of the CANN release).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub struct Version {
    /// Incompatible changes.
    pub major: i32,
    /// Additions.
    pub minor: i32,
    /// Corrections.
    pub patch: i32,
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}.{}", self.major, self.minor, self.patch)
    }
}

/// The process's connection to CANN or to its emulation.
///
/// There is one for each platform, or machine that is emulated, and process: every request gives the same one. It is
/// initialised at the first request and never finalised, since CANN cannot be initialised twice in a process. Cloning
/// is cheap; all clones are equal.
///
/// # Threads
/// `Send` and `Sync`. CANN's current device is a property of each thread; every function of this crate makes its own
/// device the calling thread's first and leaves it so.
#[derive(Clone)]
pub struct Runtime(Arc<Inner>);

struct Inner {
    api: Arc<Api>,
    platform: Platform,
    devices: Mutex<HashMap<i32, Known>>,
    installed: OnceLock<Installed>,
}

/// A device that is, or was, in use.
#[derive(Default)]
struct Known {
    shared: Weak<Shared>,
    context: Weak<Context>,
}

static NPU: OnceCell<Runtime> = OnceCell::new();
#[cfg(feature = "emulation")]
static EMULATED: Mutex<Vec<(Option<ascend_emu::Machine>, Runtime)>> = Mutex::new(Vec::new());

/// A mutex whose content is right even when a thread panicked while holding it.
pub(crate) fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Runtime {
    /// The NPU when there is one, otherwise the emulation; `ASCEND_PLATFORM` (`auto`, `npu`, `emulated`) overrides.
    ///
    /// The emulation is chosen only where CANN is not installed or sees no device. Any other problem of the NPU is an
    /// error, never a reason to go on slowly. [`Runtime::platform`] returns what was chosen.
    ///
    /// Since CANN 8.1.
    ///
    /// # Errors
    /// [`ARGUMENT_VALUE`](crate::rules::ARGUMENT_VALUE) for an unknown value of the variable; otherwise as for
    /// [`Runtime::npu`] and [`Runtime::emulated`].
    #[doc(alias = "aclInit")]
    pub fn auto() -> Result<Self> {
        let chosen = env::var_os(PLATFORM_VARIABLE).unwrap_or_default();
        match chosen.to_string_lossy().as_ref() {
            "npu" => return Self::npu(),
            "emulated" => return Self::emulated(),
            "" | "auto" => {}
            other => {
                return Err(Error::invalid(PLATFORM_VARIABLE, format_args!("{other:?}"), "auto, npu, emulated")
                    .fix("set the variable to one of them, or remove it"));
            }
        }
        let absent = match Self::npu() {
            Ok(runtime) => match runtime.device_count() {
                Ok(1..) => return Ok(runtime),
                Ok(0) => Error::invalid("device", "no NPU on this machine", "at least one for the platform npu")
                    .fix("run on a machine with an NPU, or choose the platform emulated"),
                Err(error) if is_no_device(&error) => error,
                Err(error) => return Err(error),
            },
            Err(Error::Load(error)) if error.is_absent() => Error::Load(error),
            Err(error) if is_no_device(&error) => error,
            Err(error) => return Err(error),
        };
        match Self::emulated() {
            Ok(runtime) => {
                tracing::info!("no NPU, so calls run on the CPU emulation: {absent}");
                Ok(runtime)
            }
            Err(Error::NoEmulation) => Err(absent),
            Err(error) => Err(error),
        }
    }

    /// CANN's libraries: those the program is linked against (feature `link`), otherwise those that
    /// [`Api::load`](ascend_sys::Api::load) finds.
    ///
    /// Since CANN 8.1. Calls `aclInit` with CANN's default configuration; a program that has called it before is fine.
    ///
    /// # Errors
    /// [`Error::Load`] with every path tried; [`Error::Acl`] if CANN cannot be initialised.
    #[doc(alias = "aclInit")]
    pub fn npu() -> Result<Self> {
        let start = || {
            #[cfg(feature = "link")]
            let api = Api::linked();
            // SAFETY: what stands where CANN's libraries are installed are CANN's libraries; who can replace them
            // can replace this program as well.
            #[cfg(not(feature = "link"))]
            let api = unsafe { Api::load() }?;
            Self::start(Arc::new(api), Platform::Npu)
        };
        NPU.get_or_try_init(start).cloned()
    }

    /// The emulation of CANN on the CPU, in this process.
    ///
    /// # Errors
    /// [`Error::NoEmulation`] in builds without the feature `emulation`; [`Error::Acl`] if a variable that sets the
    /// emulation up (`ASCEND_EMU_*`) cannot be understood.
    #[doc(alias = "aclInit")]
    pub fn emulated() -> Result<Self> {
        #[cfg(feature = "emulation")]
        return Self::emulation(None);
        #[cfg(not(feature = "emulation"))]
        Err(Error::NoEmulation)
    }

    /// The emulation of a product and a CANN release of the program's choice, whatever the variables `ASCEND_EMU_SOC`
    /// and `ASCEND_EMU_CANN` are. A process may use several side by side.
    ///
    /// A process has one runtime for each machine: equal machines, of the same chip's name, release and newest
    /// operator, give the same runtime, and others another. The runtime of [`Runtime::emulated`] is always separate.
    /// Tensors, streams and events of two runtimes cannot be used together.
    ///
    /// # Errors
    /// As for [`Runtime::emulated`]; [`Error::UnknownProduct`] for a chip of no known family; [`Error::Unreleased`]
    /// for a release that does not know the chip; [`ARGUMENT_VALUE`](crate::rules::ARGUMENT_VALUE) when a process
    /// uses more than 32 machines of different products, releases or newest operators, that of the environment among
    /// them, or more than 128 names of chips.
    pub fn emulated_as(machine: &Machine) -> Result<Self> {
        #[cfg(feature = "emulation")]
        return Self::emulation(Some(machine.emulated()?));
        #[cfg(not(feature = "emulation"))]
        {
            let _ = machine;
            Err(Error::NoEmulation)
        }
    }

    #[cfg(feature = "emulation")]
    fn emulation(machine: Option<ascend_emu::Machine>) -> Result<Self> {
        let mut known = lock(&EMULATED);
        if let Some((_, runtime)) = known.iter().find(|(known_machine, _)| *known_machine == machine) {
            return Ok(runtime.clone());
        }
        let functions = match &machine {
            Some(machine) => ascend_emu::functions_of(machine).map_err(machine::refused)?,
            None => ascend_emu::functions(),
        };
        let api = Api::from_functions(functions, "emulation on the CPU");
        let runtime = Self::start(Arc::new(api), Platform::Emulated)?;
        known.push((machine, runtime.clone()));
        Ok(runtime)
    }

    /// A function table that the program provides: one that records or forwards calls, or lacks some.
    ///
    /// Unlike the other constructors this makes a new runtime each time.
    ///
    /// # Errors
    /// [`Error::MissingSymbol`] without `aclInit`, [`Error::Acl`] if that fails.
    ///
    /// # Safety
    /// The functions of the table do what CANN's functions of the same names do, on any thread, until the process ends.
    #[doc(alias = "aclInit")]
    pub unsafe fn from_api(api: Arc<Api>) -> Result<Self> {
        Self::start(api, Platform::Custom)
    }

    fn start(api: Arc<Api>, platform: Platform) -> Result<Self> {
        for variable in ascend_sys::misspelt_variables_once() {
            tracing::warn!("{variable}");
        }
        // SAFETY: a null path stands for the default configuration.
        let status = unsafe { api.aclInit()?(ptr::null()) };
        match status {
            // Another library in this process has initialised it already, which is as good.
            sys::ACL_SUCCESS | sys::ACL_ERROR_REPEAT_INITIALIZE => {}
            failed => return Err(acl_error(&api, "aclInit", failed, 0)),
        }
        Ok(Self(Arc::new(Inner { api, platform, devices: Mutex::default(), installed: OnceLock::new() })))
    }

    /// A device, by its number from 0. All handles of one device share its context and its mask cache; the device is
    /// given up when the last of them, and of what was made on it, is dropped.
    ///
    /// Since CANN 8.1.
    ///
    /// # Errors
    /// [`Error::Acl`] if there is no such device or it cannot be used.
    #[doc(alias = "aclrtSetDevice")]
    pub fn device(&self, id: i32) -> Result<Device> {
        let mut devices = lock(&self.0.devices);
        let known = devices.entry(id).or_default();
        if let Some(shared) = known.shared.upgrade() {
            return Ok(Device(shared));
        }
        let context = match known.context.upgrade() {
            Some(context) => context,
            None => Arc::new(Context::open(self.clone(), id)?),
        };
        let shared = Arc::new(Shared::new(Arc::clone(&context)));
        *known = Known { shared: Arc::downgrade(&shared), context: Arc::downgrade(&context) };
        Ok(Device(shared))
    }

    /// Number of devices that this process sees.
    ///
    /// Since CANN 8.1.
    ///
    /// # Errors
    /// [`Error::Acl`], which some drivers also return for a machine without a device.
    #[doc(alias = "aclrtGetDeviceCount")]
    pub fn device_count(&self) -> Result<usize> {
        let mut count = 0u32;
        // SAFETY: `count` is a place for the result.
        unsafe { acl!(self.api(), aclrtGetDeviceCount(&mut count)) }?;
        Ok(usize::try_from(count).unwrap_or(usize::MAX))
    }

    /// Version of the runtime interface.
    ///
    /// Since CANN 8.1.
    ///
    /// # Errors
    /// [`Error::Acl`].
    #[doc(alias = "aclrtGetVersion")]
    pub fn version(&self) -> Result<Version> {
        let (mut major, mut minor, mut patch) = (0, 0, 0);
        // SAFETY: the three are places for the results.
        unsafe { acl!(self.api(), aclrtGetVersion(&mut major, &mut minor, &mut patch)) }?;
        Ok(Version { major, minor, patch })
    }

    /// The release of CANN that calls are checked for, and why. Where no contract is known for what is installed, the
    /// nearest stands in, which is logged once as a warning.
    #[doc(alias = "aclsysGetCANNVersion")]
    pub fn installed(&self) -> &Installed {
        self.0.installed.get_or_init(|| {
            let installed = Installed::of(self.api());
            if !installed.is_known() {
                tracing::warn!("calls are checked for {installed}");
            }
            installed
        })
    }

    /// What executes the calls.
    pub fn platform(&self) -> Platform {
        self.0.platform
    }

    /// The raw functions, for calls that this crate does not cover.
    pub fn api(&self) -> &Api {
        &self.0.api
    }

    /// Where the functions come from.
    pub fn origin(&self) -> &Origin {
        self.0.api.origin()
    }
}

impl fmt::Debug for Runtime {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Runtime")
            .field("platform", &self.0.platform)
            .field("origin", &self.0.api.origin().to_string())
            .finish()
    }
}

/// Whether a failure means that the machine has no device, as some drivers return it instead of a count of 0.
fn is_no_device(error: &Error) -> bool {
    matches!(error, Error::Acl { status, .. } if status.0 == sys::ACL_ERROR_RT_NO_DEVICE)
}
