//! What this crate refuses by itself, by rule: arguments of its functions, launches that differ from their plans,
//! lengths, windows and captured graphs. What a single call of an operator may look like is the contract's matter
//! ([`spec`](crate::spec)).

use ascend_spec::{Rule, UNSUPPORTED};

ascend_spec::library_rules! {
    ARGUMENT_VALUE = "argument.value", "an argument of a function has a value that the function takes",
        "give the argument one of the allowed values";
    ARGUMENT_DEVICE = "argument.device",
        "tensors, streams and events of a call are of the device where the call goes",
        "copy the tensor to that device through the host, or make the stream, event or plan on the tensor's device";
    ARGUMENT_MEMORY = "argument.memory",
        "what a call writes is memory of its own, which no other argument shares and no other caller reads",
        "give the call a tensor of its own, such as `Device::alloc` makes";
    PLAN_TENSORS = "plan.tensors",
        "a launch has the tensors and attributes that its plan was made for, at any address",
        "launch with what was planned, or plan again";
    PACKAGE_TRUSTED = "package.trusted",
        "an operator of a package other than CANN is called on an NPU once the program has vouched for its arguments",
        "read the header of the installed package, and call `causal_conv::trust_package` if it has these arguments; or \
         convolve on the host";
    EMULATED_ONLY = "platform.emulated_only",
        "what no operator of an NPU computes is planned on the emulation alone",
        "compute it without the operator on an NPU, or choose the platform emulated (`Runtime::emulated`)";
    LENGTHS_ENDS = "lengths.ends", "cumulative ends do not decrease, and have no leading 0 entry",
        "give the sums of the lengths up to each request: ends that do not decrease, without a leading 0";
    LENGTHS_BATCH = "lengths.batch", "every list of a batch has one entry for each request",
        "make the lists from the same batch";
    LENGTHS_OVERFLOW = "lengths.overflow", "sums of lengths fit the operator's integers",
        "split the batch, or end the request";
    MASK_WINDOW = "mask.window", "a window is causal and shows at least one key",
        "give a window of at least one key, or leave it out";
    GRAPH_LENGTHS = "graph.lengths", "a replay has at most the keys and blocks that were declared at the capture",
        "declare more keys at the capture, or compute the step without a graph";
    GRAPH_WORKSPACE = "graph.workspace", "a replay needs at most the workspace that the capture took",
        "capture with lengths that need the most, or compute the step without a graph";
    GRAPH_UPDATE = "graph.update",
        "a replay is given lengths once for each call captured with varying ones, made for its graph",
        "give each such call its lengths once, in an update of this graph";
    GRAPH_STREAMS = "graph.streams", "graphs take no more streams than there are",
        "capture fewer sizes or layers";
    COLLECTIVE_DEVICES = "collective.devices", "the ranks of a process have a device each, of one runtime",
        "give each device once";
    COLLECTIVE_RANK = "collective.rank", "a rank, root or peer is a rank of the communicator",
        "name a rank of the communicator";
    COLLECTIVE_PART = "collective.part",
        "a part of a communicator has some of its ranks in rising order, each once, the caller's among them",
        "give the same list of ranks on each of them, and make no call on the others";
    COLLECTIVE_LENGTH = "collective.length", "tensors and lengths of a collective have what its ranks send and receive",
        "give tensors as long as what goes from rank to rank";
    COLLECTIVE_TYPE = "collective.type", "the product has the collective, and moves and reduces the element type",
        "convert the elements to a type that the product has there";
    COLLECTIVE_MESSAGES = "collective.messages",
        "a batch has messages, and a rank receives in it what it sends to itself",
        "give each message to this rank itself its pair, or leave both out";
    COLLECTIVE_LEFT = "collective.left", "a rank that has left its communicator makes no more calls",
        "make communicators anew on all ranks, and capture the graph again";
    GRAPH_FAILED = "graph.failed", "a graph whose replay could not be ordered is not replayed again",
        "capture the graph again";
}

/// Every rule that this crate refuses by: those of the operators ([`spec::every_rule`](ascend_spec::every_rule)),
/// then its own.
pub fn every_rule() -> impl Iterator<Item = &'static Rule> {
    let own = [&UNSUPPORTED].into_iter().chain(RULES.iter().copied());
    ascend_spec::every_rule().chain(own)
}

#[cfg(test)]
mod tests {
    use ascend_spec::Violation;

    use super::*;

    #[test]
    fn refusals_tell_rule_value_bounds_and_fix() {
        let told = Violation::new(&GRAPH_STREAMS, 9, "at most 7", "capture fewer sizes");
        assert_eq!(
            told.to_string(),
            "graph.streams: graphs take no more streams than there are; given 9, allowed: at most 7; fix: capture \
             fewer sizes"
        );
    }

    #[test]
    fn every_rule_has_an_id_of_its_own_and_a_fix() {
        let mut ids: Vec<_> = RULES.iter().map(|rule| rule.id).collect();
        ids.sort_unstable();
        ids.dedup();
        assert_eq!(ids.len(), RULES.len());
        for rule in RULES {
            assert_eq!(rule.level, ascend_spec::Level::Library, "{rule}");
            assert!(!rule.holds.is_empty() && !rule.fix.is_empty(), "{rule}");
        }
    }
}
