//! Keys and values of a byte: what shares a scale, how rows become them, and the layers that they lie in.

pub(super) mod by_channel;
pub(super) mod by_group;
pub(super) mod by_token;
pub(super) mod layer;
pub(super) mod one_key_each;
pub(super) mod quantised_type;
pub(super) mod query_type;
pub(super) mod rows_on_host;
pub(super) mod write;
