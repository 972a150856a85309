//! Numbers on the device that lead elsewhere than to what a call has.

use crate::{Rule, Violation};

/// A number on the device that leads elsewhere than to the rows, states or blocks of its call.
pub trait ContentFault {
    /// What is there, and what would do.
    fn texts(&self) -> [String; 2];
}

/// Refuses a call by the first of its faults that has a rule.
pub(crate) fn check_faults<F: ContentFault>(
    faults: impl IntoIterator<Item = F>,
    rule: impl Fn(&F) -> Option<&'static Rule>,
) -> Result<(), Violation> {
    let broken = faults.into_iter().find_map(|fault| Some((rule(&fault)?, fault.texts())));
    broken.map_or(Ok(()), |(rule, [given, allowed])| Err(rule.broken(given, allowed)))
}
