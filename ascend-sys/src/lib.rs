//! Raw C ABI of Ascend CANN.
