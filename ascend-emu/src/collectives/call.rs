//! What one rank contributes to a collective, and how the contributions of two ranks differ.

use crate::operator::Access;
use ascend_spec::DType;
use ascend_spec::collective::{Collective, Reduction};
use std::fmt;

/// The kind of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Every rank calls it.
    Collective(Collective),
    /// Only the ranks that it names call it: its C function.
    PointToPoint(&'static str),
}

impl Kind {
    pub(crate) fn function(self) -> &'static str {
        match self {
            Kind::Collective(collective) => collective.function(),
            Kind::PointToPoint(function) => function,
        }
    }
}

/// Bytes that go to a rank, or come from it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Segment {
    pub peer: usize,
    pub address: usize,
    pub bytes: usize,
    pub dtype: DType,
}

/// One call of one rank.
pub(crate) struct Call {
    pub rank: usize,
    pub kind: Kind,
    pub dtype: DType,
    pub reduction: Option<Reduction>,
    pub root: Option<u32>,
    /// The count of elements, where it is the same on all ranks.
    pub count: Option<u64>,
    /// Arrays of counts and places, where they are the same on all ranks.
    pub lists: Vec<u64>,
    pub sends: Vec<Segment>,
    pub receives: Vec<Segment>,
}

impl Call {
    /// Whether every rank of the communicator makes this call.
    pub(super) fn is_collective(&self) -> bool {
        matches!(self.kind, Kind::Collective(_))
    }

    /// Visits every byte range that this rank's part of the call touches.
    pub(crate) fn accesses(&self, visit: &mut dyn FnMut(Access)) {
        for (segments, write, what) in [(&self.sends, false, "sendBuf"), (&self.receives, true, "recvBuf")] {
            let mut before = None;
            // What every rank gets is one range.
            for &Segment { address, bytes, .. } in segments {
                if before.replace((address, bytes)) != Some((address, bytes)) {
                    visit(Access { address, bytes: bytes as u64, write, what });
                }
            }
        }
    }

    /// Describes the first thing in which this rank's call is another one than that of rank `other`.
    pub(super) fn difference(&self, other: &Call) -> Option<String> {
        let (here, there) = (self.rank, other.rank);
        let differ = |field: &str, one: &dyn fmt::Display, two: &dyn fmt::Display| {
            Some(format!("{field}: {two} on rank {there}, {one} on rank {here}"))
        };
        if self.kind != other.kind {
            return differ("operator", &self.kind.function(), &other.kind.function());
        }
        if self.dtype != other.dtype {
            return differ("dataType", &self.dtype.name(), &other.dtype.name());
        }
        if let (Some(one), Some(two)) = (self.reduction, other.reduction)
            && one != two
        {
            return differ("op", &one.name(), &two.name());
        }
        if let (Some(one), Some(two)) = (self.root, other.root)
            && one != two
        {
            return differ("root", &one, &two);
        }
        if let (Some(one), Some(two)) = (self.count, other.count)
            && one != two
        {
            return differ("count", &one, &two);
        }
        let mut entries = self.lists.iter().zip(&other.lists).enumerate();
        let (at, (one, two)) = entries.find(|(_, (one, two))| one != two)?;
        differ(&format!("entry {at} of the counts and displacements"), one, two)
    }

    /// Describes a rank of which this one expects another number of bytes than it sends.
    pub(super) fn count_mismatch(&self, sender: &Call) -> Option<String> {
        let (here, there) = (self.rank, sender.rank);
        let bytes = |segments: &[Segment], peer| {
            let mut to = segments.iter().filter(|segment| segment.peer == peer);
            to.next().map_or(0, |segment| segment.bytes)
        };
        let (expected, sent) = (bytes(&self.receives, there), bytes(&sender.sends, here));
        let elements = |bytes: usize| bytes / self.dtype.size().unwrap_or(1).max(1);
        (expected != sent).then(|| {
            format!(
                "count: rank {there} sends {} elements to rank {here}, which expects {}",
                elements(sent),
                elements(expected)
            )
        })
    }
}

impl fmt::Display for Call {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.kind.function())?;
        if self.kind == Kind::Collective(Collective::Barrier) {
            return Ok(());
        }
        match self.count {
            Some(count) => write!(f, " of {count} {}", self.dtype.name())?,
            None => write!(f, " of {}", self.dtype.name())?,
        }
        if let Some(reduction) = self.reduction {
            write!(f, ", {}", reduction.name())?;
        }
        if let Some(root) = self.root {
            write!(f, ", root {root}")?;
        }
        Ok(())
    }
}

impl fmt::Debug for Call {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self} of rank {}", self.rank)
    }
}
