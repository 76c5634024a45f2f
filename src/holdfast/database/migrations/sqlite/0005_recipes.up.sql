-- What the recipes need: the audit learns of fences, and slots, which are '<pool>:<number>' by name, are found by pool.
alter table holdfast_audit add column fence integer;
alter table holdfast_beat add column wanted text;

-- A name that only looks like one of a slot takes up no room.
create view holdfast_slot as
select * from (
    select name, substr(name, 1, length(rtrim(name, '0123456789')) - 1) as pool, cast(substr(name, length(rtrim(name, '0123456789')) + 1) as integer) as slot,
           holder, fence, remaining, token
      from holdfast_live where name glob '@slot:*:[1-9]*')
 where slot <= 999999 and name = pool || ':' || slot;

insert into holdfast_schema_version (version, name) values (5, 'recipes');
