//! Keys and values of one byte: which numbers share a scale, how rows are quantised, and the layers that store them.

pub(super) mod by_channel;
pub(super) mod by_group;
pub(super) mod by_token;
pub(super) mod layer;
pub(super) mod one_key_each;
pub(super) mod quantised_type;
pub(super) mod query_type;
pub(super) mod rows_on_host;
pub(super) mod write;
