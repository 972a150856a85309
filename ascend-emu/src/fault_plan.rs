//! Plans of faults on demand: the n-th call of a kind fails with a chosen status.

use crate::named_enum::named_enum;

named_enum! {
    /// Calls that can be made to fail.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    #[non_exhaustive]
    pub enum Site {
        /// `aclrtMalloc`, `aclrtMallocAlign32`, `aclrtMallocHost`.
        Malloc => "malloc",
        /// Phase two of an operator. A device fault (507xxx) shows at the next synchronisation, any other status at
        /// once.
        Launch => "launch",
        /// A synchronisation of a stream, event or device.
        Sync => "sync",
        /// `aclrtMemcpy`, `aclrtMemcpyAsync`.
        Memcpy => "memcpy",
    }
}

/// One fault to come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Entry {
    id: u64,
    site: Site,
    /// Calls left until the fault strikes; 0 afterwards.
    left: u64,
    code: i32,
}

/// Faults to come.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Plan(Vec<Entry>);

impl Plan {
    /// How plans are written.
    pub(crate) const FORM: &str = "a comma-separated list of SITE:N=STATUS with SITE one of malloc, launch, sync, \
                                   memcpy, N from 1 on and STATUS not 0";

    /// Reads `malloc:3=207001,launch:1=507015`.
    pub(crate) fn parse(text: &str) -> Option<Self> {
        let entry = |text: &str| {
            let (site, rest) = text.trim().split_once(':')?;
            let (n, code) = rest.split_once('=')?;
            let entry = Entry { id: 0, site: site.parse().ok()?, left: n.parse().ok()?, code: code.parse().ok()? };
            (entry.left > 0 && entry.code != 0).then_some(entry)
        };
        text.split(',').filter(|part| !part.trim().is_empty()).map(entry).collect::<Option<_>>().map(Plan)
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Adds a fault for the `nth` call of a kind from now on, and returns the number of the fault in this plan.
    pub(crate) fn add(&mut self, site: Site, nth: u64, code: i32) -> u64 {
        let id = self.0.last().map_or(1, |entry| entry.id.wrapping_add(1));
        self.0.push(Entry { id, site, left: nth, code });
        id
    }

    /// Takes a fault out of the plan.
    pub(crate) fn remove(&mut self, id: u64) {
        self.0.retain(|entry| entry.id != id);
    }

    /// Counts one call. The result is the status of the fault that strikes it.
    pub(crate) fn count(&mut self, site: Site) -> Option<i32> {
        let mut struck = None;
        for entry in self.0.iter_mut().filter(|e| e.site == site && e.left > 0) {
            entry.left -= 1;
            if entry.left == 0 {
                struck = struck.or(Some(entry.code));
            }
        }
        struck
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn plans_are_read() {
        let mut plan = Plan::parse("malloc:2=207001, sync:1=507014,").unwrap();
        assert_eq!(plan.count(Site::Malloc), None);
        assert_eq!(plan.count(Site::Malloc), Some(207_001));
        assert_eq!(plan.count(Site::Malloc), None);
        assert_eq!(plan.count(Site::Sync), Some(507_014));
        assert_eq!(plan.count(Site::Launch), None);
        for wrong in ["malloc", "malloc:0=1", "malloc:1=0", "free:1=2", "sync:x=2"] {
            assert!(Plan::parse(wrong).is_none(), "{wrong}");
        }
    }
}
