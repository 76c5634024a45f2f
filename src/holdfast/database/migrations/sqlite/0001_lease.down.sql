drop view holdfast_live;
drop table holdfast_history;
drop table holdfast_lease;
drop table holdfast_beat;
drop table holdfast_fence;
drop view holdfast_clock;
drop table holdfast_schema_version;
