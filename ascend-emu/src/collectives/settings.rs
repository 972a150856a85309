//! What programs choose of a communicator.

use super::communicator::Communicator;
use crate::config::config;
use std::time::Duration;

/// What a communicator is made with.
#[derive(Clone, Debug, Default)]
pub(crate) struct Settings {
    /// Its name, if the program chooses one.
    pub name: Option<String>,
    /// How long a rank waits for the others, if the program chooses that.
    pub limit: Option<Duration>,
}

impl Settings {
    /// Makes a communicator, whose name is chosen or this one.
    pub(super) fn communicator(&self, size: usize, name: impl FnOnce() -> String) -> Communicator {
        Communicator::new(self.name.clone().unwrap_or_else(name), size, self.limit())
    }

    pub(super) fn limit(&self) -> Duration {
        self.limit.unwrap_or(config().collective_limit)
    }

    /// The name and the limit in seconds, each empty where it is not chosen.
    pub(super) fn to_parts(&self) -> (&str, u64) {
        (self.name.as_deref().unwrap_or_default(), self.limit.map_or(0, |limit| limit.as_secs()))
    }

    pub(super) fn of_parts(name: String, seconds: u64) -> Self {
        let limit = (seconds > 0).then(|| Duration::from_secs(seconds));
        Settings { name: Some(name).filter(|name| !name.is_empty()), limit }
    }
}
