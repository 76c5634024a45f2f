-- For the recipes: slots, which are named '<pool>:<number>', are found by pool.
alter table holdfast_beat add column wanted text;

-- A name that only resembles a slot's does not count against the capacity.
create view holdfast_slot as
select * from (
    select name, substr(name, 1, length(rtrim(name, '0123456789')) - 1) as pool,
           cast(substr(name, length(rtrim(name, '0123456789')) + 1) as integer) as slot,
           holder, fence, remaining, token
      from holdfast_live where name glob '@slot:*:[1-9]*')
 where slot <= 999999 and name = pool || ':' || slot;

insert into holdfast_schema_version (version, name) values (5, 'recipes');
