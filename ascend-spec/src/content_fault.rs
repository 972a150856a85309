//! Numbers on the device that lead elsewhere than to what a call has.

use crate::{Rule, Violation};

/// A number on the device that leads elsewhere than to the rows, states or blocks of its call.
pub trait ContentFault {
    /// What is there, and what would do.
    fn texts(&self) -> [String; 2];

    /// What to change, where the advice of the rule does not mend it.
    fn fix(&self) -> Option<String> {
        None
    }
}

/// Refuses a call by the first of its faults that has a rule.
pub(crate) fn check_faults<F: ContentFault>(
    faults: impl IntoIterator<Item = F>,
    rule: impl Fn(&F) -> Option<&'static Rule>,
) -> Result<(), Violation> {
    let broken = faults.into_iter().find_map(|fault| Some((rule(&fault)?, fault)));
    broken.map_or(Ok(()), |(rule, fault)| {
        let [given, allowed] = fault.texts();
        let violation = rule.broken(given, allowed);
        Err(Violation { fix: fault.fix().unwrap_or(violation.fix), ..violation })
    })
}

/// Shows faults by their texts.
macro_rules! shown_by_texts {
    ($fault:ty) => {
        impl std::fmt::Display for $fault {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                let [given, allowed] = self.texts();
                write!(f, "{given}, allowed: {allowed}")
            }
        }
    };
}

pub(crate) use shown_by_texts;
